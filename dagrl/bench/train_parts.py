"""Where the GPU's time in a training step goes, by kind of kernel: `dagrl bench train --parts`.

Kernels are those that torch's profiler records in one step. Matrix products below the output layer's function are apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Protocol

from dagrl.bench.harness import answer
from dagrl.bench.train_inputs import single_worker, train_batch
from dagrl.config.file import load_config
from dagrl.imports import load_class

OUTPUT_LAYER = "_TokenLogprobs"
"""Part of the names of the output layer's functions, forward and backward."""

OUTPUT_PRODUCTS = "output layer"
"""Kind of the matrix products below the output layer."""

FULL_BUFFER = "Command Buffer Full"
"""CUPTI's events of a launch that waited for room, which torch gives the kernels of that launch once more."""

KINDS = {
    "attention": r"flash|fmha|sdpa|attention",
    "products": r"gemm|cutlass|nvjet|xmma|cublas|splitK",
    "norms": r"_norm_(backward_)?kernel|rms_norm|layer_norm",
    "rotary": r"_rotate_kernel",
    "quantization": r"_quantize_kernel|AbsMaxOps|cast_transpose|amax_kernel",
    "swiglu": r"_swiglu_|silu",
    "vocabulary sums": r"_row_sums|_row_gradients",
    "optimizer": r"[Aa]dam|multi_tensor|foreach",
    "copies": r"[Mm]emcpy|[Mm]emset|copy|Cat",
}
"""Patterns of kernel names; the first that is found counts. Other kernels are `elementwise`."""


class Event(Protocol):
    """What is read of torch's `FunctionEvent`."""

    name: str
    kernels: Any  # each with a name, and a duration in microseconds
    cpu_parent: Any


def step_parts(events: Iterable[Event]) -> dict[str, float]:
    """Returns the milliseconds of a step's kernels by kind, largest first. Products of the output layer are apart."""
    found: dict[str, float] = {}
    for event in events:
        for kernel in event.kernels if event.name != FULL_BUFFER else ():
            kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel.name)), "elementwise")
            if kind == "products" and _below_output_layer(event):
                kind = OUTPUT_PRODUCTS
            found[kind] = found.get(kind, 0.0) + kernel.duration / 1e3
    return {kind: round(found[kind], 2) for kind in sorted(found, key=lambda kind: -found[kind])}


def _below_output_layer(event: Any) -> bool:
    while event is not None:
        if OUTPUT_LAYER in event.name:
            return True
        event = event.cpu_parent
    return False


def work(config: str) -> dict[str, float]:
    """Takes some steps on one worker in this process, and profiles one more."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from dagrl.workers.train.worker import TrainWorker

    settings = load_config(config)
    policy = settings.policy
    assert policy.worker is not None, "`dagrl config` has derived it"
    batch = train_batch(policy.train_global_batch_size, policy.max_total_sequence_length, vocabulary=512)
    kind: type[TrainWorker] = load_class(policy.worker, "policy.worker")
    with single_worker(settings, kind) as worker:
        for _ in range(3):
            worker.train_step(batch, "likelihood")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            worker.train_step(batch, "likelihood")
            torch.cuda.synchronize()
        return step_parts(profiler.events())


if __name__ == "__main__":
    answer(work)
