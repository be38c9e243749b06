"""The Triton kernel of blockwise FP8: one program a block of 128x128, any number of tensors in one launch.

A table on the device says for each block where it lies, where its bytes and its scale go, and how much of it there is.
Import this module only where there is a GPU: Triton comes with torch's CUDA builds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from dagrl.refit.quantize import BLOCK, LARGEST, SMALLEST_PEAK

if TYPE_CHECKING:
    from torch import Tensor

_FIELDS = 8  # of a row: address of the block, of its FP8, of its scale; rows, columns; strides down, right, down the FP8
_WARPS = 8
_TYPES: dict[str, Any] = {"torch.bfloat16": tl.bfloat16, "torch.float16": tl.float16, "torch.float32": tl.float32}


class BlockTable:
    """All blocks of `parts`, of one dtype: (weight, place of its FP8, place of its scales). See `BlockQuantizer`."""

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        import torch

        self._parts = list(parts)  # keeps their memory alive: the table has addresses only
        rows = np.concatenate([_rows(*matrix) for part in parts for matrix in _matrices(*part)])
        self._count = len(rows)
        self._table = torch.from_numpy(rows).to(parts[0][0].device)

    def launch(self) -> None:
        """Quantize every block, on the current stream."""
        _quantize_block[(self._count,)](
            self._table,
            SOURCE=_TYPES[str(self._parts[0][0].dtype)],
            BLOCK=BLOCK,
            FIELDS=_FIELDS,
            LARGEST=LARGEST,
            SMALLEST=SMALLEST_PEAK,
            num_warps=_WARPS,
        )


def _matrices(weight: Tensor, place: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The matrices of a stack of any depth."""
    if weight.dim() == 2:
        yield weight, place, scales
        return
    for one in zip(weight, place, scales, strict=True):
        yield from _matrices(*one)


def _rows(weight: Tensor, place: Tensor, scales: Tensor) -> npt.NDArray[np.int64]:
    """`[blocks, FIELDS]`: the rows of the table for one matrix."""
    (down, right), (to_down, to_right) = weight.stride(), place.stride()
    assert to_right == 1, f"FP8 goes into rows without gaps, not with stride {to_right}"
    top, left = (index.reshape(-1) * BLOCK for index in np.indices(scales.shape))
    rows = np.empty((top.size, _FIELDS), np.int64)
    rows[:, 0] = weight.data_ptr() + (top * down + left * right) * weight.element_size()
    rows[:, 1] = place.data_ptr() + top * to_down + left
    rows[:, 2] = scales.data_ptr() + (top * scales.stride(0) + left * scales.stride(1)) // BLOCK * scales.element_size()
    rows[:, 3] = np.minimum(weight.shape[0] - top, BLOCK)
    rows[:, 4] = np.minimum(weight.shape[1] - left, BLOCK)
    rows[:, 5:] = down, right, to_down
    return rows


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _quantize_block(  # type: ignore[no-untyped-def]
    table,
    SOURCE: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    row = table + tl.program_id(0).to(tl.int64) * FIELDS
    source = tl.load(row).to(tl.pointer_type(SOURCE))
    place = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    scale_place = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    rows, columns = tl.load(row + 3), tl.load(row + 4)
    down, right, to_down = tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    y = tl.arange(0, BLOCK)[:, None].to(tl.int64)
    x = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    inside = (y < rows) & (x < columns)
    block = tl.load(source + y * down + x * right, mask=inside, other=0.0).to(tl.float32)
    peak = tl.maximum(tl.max(tl.max(tl.abs(block), axis=1), axis=0), SMALLEST)
    scale = tl.math.div_rn(peak, LARGEST)  # as torch divides: Triton's `/` may be off by an ulp
    quantized = (block * tl.math.div_rn(1.0, scale)).to(tl.float8e4nv)
    tl.store(place + y * to_down + x, quantized.to(tl.uint8, bitcast=True), mask=inside)
    tl.store(scale_place, scale)
