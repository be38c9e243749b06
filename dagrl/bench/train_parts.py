"""Where the GPU's time in a training step goes, by kind of kernel: `dagrl bench train --parts`.

Kernels are those that torch's profiler records in one step. Matrix products below the output layer's function are apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dagrl.bench.report import print_rows

OUTPUT_LAYER = "_TokenLogprobs"
"""Part of the names of the output layer's functions, forward and backward."""

HEAD = (HEAD_PRODUCTS, VOCABULARY_SUMS) = ("output layer", "vocabulary sums")
"""Kinds of kernels that are not the layers'."""

FULL_BUFFER = "Command Buffer Full"
"""CUPTI's events of a launch that waited for room, which torch gives the kernels of that launch once more."""

KINDS = {
    "attention": r"flash|fmha|sdpa|attention",
    "products": r"gemm|cutlass|nvjet|xmma|cublas|splitK",
    "norms": r"_norm_(backward_)?kernel|rms_norm|layer_norm",
    "rotary": r"_rotate_kernel",
    "quantization": r"_quantize_kernel|AbsMaxOps|cast_transpose|amax_kernel",
    "swiglu": r"_swiglu_|silu",
    VOCABULARY_SUMS: r"_row_sums|_row_gradients",
    "optimizer": r"[Aa]dam|multi_tensor|foreach",
    "copies": r"[Mm]emcpy|[Mm]emset|copy|Cat",
}
"""Patterns of kernel names; the first that is found counts. Other kernels are `elementwise`."""


class Event(Protocol):
    """What is read of torch's `FunctionEvent`."""

    name: str
    kernels: Any  # each with a name, and a duration in microseconds
    cpu_parent: Any


@dataclass(frozen=True)
class StepParts:
    """The milliseconds of a step's kernels by kind, and their sum."""

    parts_ms: Mapping[str, float]
    busy_ms: float


def kind_of(kernel: str) -> str:
    """Returns the kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), "elementwise")


def step_parts(events: Iterable[Event]) -> StepParts:
    """Sums the kernels of a step by kind. Products of the output layer are `output layer`."""
    found: dict[str, float] = {}
    for event in events:
        for kernel in event.kernels if event.name != FULL_BUFFER else ():
            kind = kind_of(kernel.name)
            if kind == "products" and _below_output_layer(event):
                kind = HEAD_PRODUCTS
            found[kind] = found.get(kind, 0.0) + kernel.duration / 1e3
    ordered = {kind: round(found[kind], 2) for kind in sorted(found, key=lambda kind: -found[kind])}
    return StepParts(ordered, round(sum(found.values()), 2))


def print_parts(case: str, parts: StepParts, step_ms: float, layers_mfu: float | None) -> None:
    """Prints the kinds with their shares of the step, and the MFU of the layers alone."""
    rows = ((kind, f"{spent:.1f}", f"{spent / step_ms:.1%}") for kind, spent in parts.parts_ms.items())
    title = f"{case}: step {step_ms:.1f} ms, kernels {parts.busy_ms:.1f} ms"
    caption = "" if layers_mfu is None else f"MFU of the layers alone: {layers_mfu:.1%}"
    print_rows(("kernels", "ms", "of the step"), rows, title, caption)


def _below_output_layer(event: Any) -> bool:
    while event is not None:
        if OUTPUT_LAYER in event.name:
            return True
        event = event.cpu_parent
    return False
