"""Measures optimizer offload during log-probabilities: what it costs and how much memory it frees.

    dagrl bench optimizer_offload [--model qwen3-0.6b] [--rows 16] [--length 2048] [--json F]

One worker on one GPU takes the same steps in three variants, in turn: `off` (the state stays on the GPU), `on`
(`policy.offload_optimizer_for_logprob`) and `blocking` (a plain copy of every tensor by `.to("cpu")` and back). A step is
logprob_inference_prep, log-probabilities, training_prep and an optimizer step. `prep_ms` is the time of both preparations as
the caller sees it, and `step_ms` the whole step: what `on` does not hide is its difference to `off`. Peaks count memory that
kernels or copies may still use (torch's active bytes). With enough free memory, log-probabilities start before the copies
are done. `fits` therefore tells whether they run with half of the state's memory taken away from what `off` needs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from dagrl.bench.models import SHAPES, write_model
from dagrl.bench.train_inputs import add_model_arguments, measure_and_report, one_gpu_config, single_worker, train_batch

if TYPE_CHECKING:
    from torch import Tensor

    from dagrl.config import Config
    from dagrl.runtime.shapes import Batch
    from dagrl.workers.megatron import MegatronWorker

VARIANTS = ("off", "on", "blocking")
GIB = 1 << 30


@dataclass(frozen=True)
class OffloadRow:
    """Medians over rounds, in milliseconds and GiB; `spread_ms` is the interquartile range of `step_ms`."""

    variant: str
    model: str
    tokens: int
    state_gib: float
    rounds: int
    logprob_inference_prep_ms: float
    training_prep_ms: float
    prep_ms: float
    logprobs_ms: float
    train_ms: float
    step_ms: float
    spread_ms: float
    device_allocations: float
    logprobs_peak_gib: float
    step_peak_gib: float
    limit_gib: float
    fits: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dagrl bench optimizer_offload`."""
    add_model_arguments(parser, SHAPES, "qwen3-0.6b", rows=16, length=2048)
    parser.add_argument("--micro", type=int, default=4, help="sequences per microbatch")
    parser.add_argument("--rounds", type=int, default=4, help="counted steps per variant and turn; blocking: 2")
    parser.add_argument("--turns", type=int, default=2, help="turns of each variant")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="default: all")


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the requested file."""
    measure_and_report(options, measure, print_table, without_gpu="the benchmark measures copies between a GPU and the host")


def measure(options: argparse.Namespace, directory: Path) -> list[OffloadRow]:
    """Measures all variants in every round, on one worker."""
    from dagrl.workers.megatron import MegatronWorker

    config = worker_config(write_model(SHAPES[options.model], directory, "cuda"), options)
    batch = train_batch(options.rows, options.length, vocabulary=150_000)
    samples: dict[str, list[dict[str, float]]] = {variant: [] for variant in options.variants}
    with single_worker(config, MegatronWorker) as worker:
        for _ in range(options.turns):
            for variant in options.variants:
                steps = options.rounds if variant != "blocking" else 2
                taken = [one_step(worker, batch, variant) for _ in range(steps + 1)]
                samples[variant] += taken[1:]  # the first step starts with the previous variant's memory
        state = worker._ready().offloader.nbytes("optimizer")
        limit = int(median(sample["logprobs_peak"] for sample in samples["off"]) * GIB) - state // 2
        fits = {variant: runs_within(worker, batch, variant, limit) for variant in options.variants}
    return [
        as_row(variant, options, state / GIB, samples[variant], limit / GIB, fits[variant]) for variant in options.variants
    ]


def runs_within(worker: MegatronWorker, batch: Batch, variant: str, limit: int) -> bool:
    """Returns whether log-probabilities run, after the variant's preparation, within `limit` bytes of GPU memory."""
    import torch

    before, after = preparations(worker, variant)
    before()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    try:
        worker.logprobs(rows_of(batch))
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        after()
        worker.train_step(batch, "likelihood")


def worker_config(model: Path, options: argparse.Namespace) -> Config:
    """Returns a configuration with BF16 weights and float32 master weights."""
    batches = {"train_micro_batch_size": options.micro, "logprob_batch_size": options.micro}
    return one_gpu_config(model, options.length, {"precision": "bfloat16", **batches})


def one_step(worker: MegatronWorker, batch: Batch, variant: str) -> dict[str, float]:
    """Returns the seconds of each part, and peaks in GiB."""
    import torch

    before, after = preparations(worker, variant)
    rows = rows_of(batch)
    found: dict[str, float] = {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocations = device_allocations()
    start = time.perf_counter()
    found["logprob_inference_prep"] = timed(before)
    torch.cuda.reset_peak_memory_stats()
    found["logprobs"] = timed(lambda: worker.logprobs(rows))
    found["logprobs_peak"] = active_peak()
    found["training_prep"] = timed(after)
    found["train"] = timed(lambda: worker.train_step(batch, "likelihood"))
    torch.cuda.synchronize()
    found["step"] = time.perf_counter() - start
    found["device_allocations"] = device_allocations() - allocations
    found["step_peak"] = max(found["logprobs_peak"], active_peak())
    return found


def preparations(worker: MegatronWorker, variant: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns the functions that run before and after the log-probabilities."""
    if variant == "off":
        return (lambda: None), (lambda: None)
    if variant == "on":
        return (lambda: worker.prepare_for_logprobs(0)), (lambda: worker.prepare_for_training(0))
    copies: list[Tensor] = []
    tensors = worker._ready().optimizer_tensors()

    def leave() -> None:
        for tensor in tensors:
            copies.append(tensor.to("cpu"))
            tensor.untyped_storage().resize_(0)

    def come_back() -> None:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.untyped_storage().resize_(copy.nbytes)
            tensor.copy_(copy)

    return leave, come_back


def rows_of(batch: Batch) -> Batch:
    """Returns the fields of a batch that log-probabilities need."""
    from dagrl.runtime.shapes import Batch

    return Batch({"tokens": batch["tokens"], "lengths": batch["lengths"]})


def device_allocations() -> float:
    """Returns how often torch allocated memory from the driver, which is slow."""
    import torch

    return float(torch.cuda.memory_stats()["num_device_alloc"])


def timed(action: Callable[[], object]) -> float:
    """Returns the seconds until `action` returns."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def active_peak() -> float:
    """Returns the peak of used GiB; memory counts until the last kernel or copy that uses it has finished."""
    import torch

    return float(torch.cuda.memory_stats()["active_bytes.all.peak"]) / GIB


def as_row(
    variant: str, options: argparse.Namespace, state: float, samples: list[dict[str, float]], limit: float, fits: bool
) -> OffloadRow:
    """Returns one row from a variant's samples."""
    import numpy as np

    def middle(*names: str) -> float:
        return round(median(sum(sample[name] for name in names) for sample in samples) * 1e3, 2)

    low, high = np.percentile([sample["step"] for sample in samples], [25, 75])
    return OffloadRow(
        variant=variant,
        model=options.model,
        tokens=options.rows * options.length,
        state_gib=round(state, 2),
        rounds=len(samples),
        logprob_inference_prep_ms=middle("logprob_inference_prep"),
        training_prep_ms=middle("training_prep"),
        prep_ms=middle("logprob_inference_prep", "training_prep"),
        logprobs_ms=middle("logprobs"),
        train_ms=middle("train"),
        step_ms=middle("step"),
        spread_ms=round(float(high - low) * 1e3, 2),
        device_allocations=median(sample["device_allocations"] for sample in samples),
        logprobs_peak_gib=round(max(sample["logprobs_peak"] for sample in samples), 2),
        step_peak_gib=round(max(sample["step_peak"] for sample in samples), 2),
        limit_gib=round(limit, 2),
        fits=fits,
    )


def print_table(rows: list[OffloadRow]) -> None:
    """Prints the rows."""
    from rich.console import Console
    from rich.table import Table

    head = f"{rows[0].model}, {rows[0].tokens} tokens a step, optimizer state {rows[0].state_gib} GiB"
    fits = f"fits {rows[0].limit_gib} GiB"
    table = Table(
        "variant", "prep ms", "logprobs ms", "train ms", "step ms", "spread", "allocs", "peak GiB", fits, title=head
    )
    for row in rows:
        times = (row.prep_ms, row.logprobs_ms, row.train_ms, row.step_ms, row.spread_ms, row.device_allocations)
        table.add_row(row.variant, *map(str, times), f"{row.logprobs_peak_gib} {row.step_peak_gib}", str(row.fits))
    Console(width=120).print(table)
