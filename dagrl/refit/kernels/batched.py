"""Copies and quantizes all slices of a bucket in one launch, of any shapes.

On GPUs `copy_kernel.py` copies from a table of rows, and casts float32 to bfloat16. `torch._foreach_copy_` does what the
kernel cannot (other casts, and views without contiguous rows, such as transposed ones), and everything on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dagrl.refit.fp8 import quantize_blocks
from dagrl.refit.kernels.rows import as_rows

if TYPE_CHECKING:
    from torch import Tensor

    from dagrl.refit.kernels.copy_kernel import CopyTable
    from dagrl.refit.kernels.quantize_kernel import BlockTable

Quantized = tuple["Tensor", "Tensor", "Tensor"]  # a weight, the target of its FP8, and the target of its scales


class BatchedCopy:
    """Copies `sources[i]`, of equal shape, into `targets[i]` on each `run`, and quantizes others.

    Their memory must stay allocated.
    """

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor], quantized: Sequence[Quantized] = ()) -> None:
        self._quantizer = BlockQuantizer(quantized)
        pairs = list(zip(targets, sources, strict=True))
        rows = [as_rows(*pair) if pair[0].is_cuda else None for pair in pairs]
        self._others = [pair for pair, some in zip(pairs, rows, strict=True) if some is None]
        self._tables: list[CopyTable] = []
        if len(self._others) < len(pairs):
            from dagrl.refit.kernels.copy_kernel import CopyTable

            self._kept = pairs  # the tables hold addresses only
            known = [row for some in rows if some for row in some]
            parts = ([row for row in known if row.casts is casts] for casts in (False, True))
            self._tables = [CopyTable(part, targets[0].device) for part in parts if part]

    def run(self, alone: bool = False) -> None:
        """Copies everything, on the current stream. `alone` uses the whole GPU; otherwise most of it is left to NCCL."""
        for table in self._tables:
            table.launch(alone)
        if self._others:
            with torch.inference_mode():  # vLLM's parameters may be inference tensors
                torch._foreach_copy_([target for target, _ in self._others], [source for _, source in self._others])
        self._quantizer.run(alone)


class BlockQuantizer:
    """Quantizes the same tensors on each `run`: on GPUs in one launch per dtype of the weights."""

    def __init__(self, parts: Sequence[Quantized]) -> None:
        self._tables = _block_tables([part for part in parts if _has_kernel(part[0])])
        self._others = [part for part in parts if not _has_kernel(part[0])]

    def run(self, alone: bool = False) -> None:
        """Quantizes all parts; on GPUs on the current stream. `alone` uses the whole GPU, as in `BatchedCopy.run`."""
        for table in self._tables:
            table.launch(alone)
        for weight, place, scale_place in self._others:
            quantized, scales = quantize_blocks(weight)
            place.view(torch.uint8).copy_(quantized.view(torch.uint8))
            scale_place.copy_(scales)


def _has_kernel(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _block_tables(parts: Sequence[Quantized]) -> list[BlockTable]:
    """Returns one table per dtype."""
    if not parts:
        return []
    from dagrl.refit.kernels.quantize_kernel import BlockTable

    groups: dict[object, list[Quantized]] = {}
    for part in parts:
        groups.setdefault(part[0].dtype, []).append(part)
    return [BlockTable(some) for some in groups.values()]
