"""Quantizes many tensors to blockwise FP8 at once: one kernel launch per dtype on GPUs, torch on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagrl.refit.fp8 import quantize_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from dagrl.refit.kernels.quantize_kernel import BlockTable


class BlockQuantizer:
    """Quantizes the same tensors on each `run`. `parts` are (weight, target of its FP8, target of its scales).

    On GPUs `run` is one launch per dtype of the weights. It neither allocates nor waits, so a CUDA graph can capture it. The
    memory of all tensors must stay allocated.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        self._tables = _tables([part for part in parts if _has_kernel(part[0])])
        self._others = [part for part in parts if not _has_kernel(part[0])]

    def run(self, alone: bool = False) -> None:
        """Quantizes all parts; on GPUs on the current stream. `alone` uses the whole GPU, as in `BatchedCopy.run`."""
        import torch

        for table in self._tables:
            table.launch(alone)
        for weight, place, scale_place in self._others:
            quantized, scales = quantize_blocks(weight)
            place.view(torch.uint8).copy_(quantized.view(torch.uint8))
            scale_place.copy_(scales)


def _has_kernel(weight: Tensor) -> bool:
    import torch

    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _tables(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[BlockTable]:
    """Returns one table per dtype."""
    if not parts:
        return []
    from dagrl.refit.kernels.quantize_kernel import BlockTable

    groups: dict[object, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for part in parts:
        groups.setdefault(part[0].dtype, []).append(part)
    return [BlockTable(some) for some in groups.values()]
