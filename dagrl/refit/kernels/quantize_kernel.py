"""Triton kernel of blockwise FP8: one 128x128 block at a time, any number of tensors in one launch.

A table on the device holds each block's address, the targets of its bytes and its scale, and its size. Full blocks of
contiguous rows, nearly all of them, are read and written 16 bytes at a time; the others have a launch of their own. While
the channel's kernels send a bucket there are fewer programs than multiprocessors, so that these kernels find free ones.
Import this module only on machines with a GPU: Triton comes with torch's CUDA builds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from dagrl.refit.fp8 import BLOCK, LARGEST, SMALLEST_PEAK

if TYPE_CHECKING:
    from torch import Tensor

_FIELDS = 8
"""Of a row: addresses of the block, its FP8, its scale; rows, columns; strides down and right, stride down the FP8."""
_WARPS = 8
_WIDE = 16  # bytes per access
PROGRAMS, PROGRAMS_ALONE = 96, 264
_TYPES: dict[str, Any] = {"torch.bfloat16": tl.bfloat16, "torch.float16": tl.float16, "torch.float32": tl.float32}


class BlockTable:
    """All blocks of `parts`, of one dtype: (weight, target of its FP8, target of its scales). See `BlockQuantizer`."""

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        self._parts = list(parts)  # keeps their memory alive: the table holds addresses only
        weight = parts[0][0]
        rows = np.concatenate([_rows(*matrix) for part in parts for matrix in _matrices(*part)])
        whole = _are_whole(rows, weight.element_size())
        self._tables = [
            (torch.from_numpy(some).to(weight.device), is_whole)
            for some, is_whole in ((rows[whole], True), (rows[~whole], False))
            if len(some)
        ]

    def launch(self, alone: bool) -> None:
        """Quantizes every block, on the current stream."""
        for table, is_whole in self._tables:
            _quantize_blocks[(min(PROGRAMS_ALONE if alone else PROGRAMS, len(table)),)](
                table,
                len(table),
                SOURCE=_TYPES[str(self._parts[0][0].dtype)],
                WHOLE=is_whole,
                BLOCK=BLOCK,
                FIELDS=_FIELDS,
                LARGEST=LARGEST,
                SMALLEST=SMALLEST_PEAK,
                num_warps=_WARPS,
            )


def _matrices(weight: Tensor, place: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the matrices of a stack of any depth."""
    if weight.dim() == 2:
        yield weight, place, scales
        return
    for matrix in zip(weight, place, scales, strict=True):
        yield from _matrices(*matrix)


def _rows(weight: Tensor, place: Tensor, scales: Tensor) -> npt.NDArray[np.int64]:
    """Returns the table rows of one matrix, `[blocks, FIELDS]`."""
    (down, right), (to_down, to_right) = weight.stride(), place.stride()
    assert to_right == 1, f"FP8 is written to contiguous rows, not with stride {to_right}"
    top, left = (index.reshape(-1) * BLOCK for index in np.indices(scales.shape))
    rows = np.empty((top.size, _FIELDS), np.int64)
    rows[:, 0] = weight.data_ptr() + (top * down + left * right) * weight.element_size()
    rows[:, 1] = place.data_ptr() + top * to_down + left
    rows[:, 2] = scales.data_ptr() + (top * scales.stride(0) + left * scales.stride(1)) // BLOCK * scales.element_size()
    rows[:, 3] = np.minimum(weight.shape[0] - top, BLOCK)
    rows[:, 4] = np.minimum(weight.shape[1] - left, BLOCK)
    rows[:, 5:] = down, right, to_down
    return rows


def _are_whole(rows: npt.NDArray[np.int64], item: int) -> npt.NDArray[np.bool_]:
    """Returns which blocks are full, have contiguous rows, and are aligned for wide accesses."""
    odd = (rows[:, 0] | rows[:, 1] | rows[:, 5] * item | rows[:, 7]) % _WIDE != 0
    full = (rows[:, 3] == BLOCK) & (rows[:, 4] == BLOCK) & (rows[:, 6] == 1)
    return np.asarray(full & ~odd)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _quantize_blocks(  # type: ignore[no-untyped-def]
    table,
    count,
    SOURCE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    y = tl.arange(0, BLOCK)[:, None].to(tl.int64)
    x = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        row = table + index * FIELDS
        source = tl.load(row).to(tl.pointer_type(SOURCE))
        place = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
        scale_place = tl.load(row + 2).to(tl.pointer_type(tl.float32))
        down, to_down = tl.load(row + 5), tl.load(row + 7)
        if WHOLE:
            source, place = tl.multiple_of(source, 16), tl.multiple_of(place, 16)
            down, to_down = tl.multiple_of(down, 8), tl.multiple_of(to_down, 16)
            block = tl.load(source + y * down + x, cache_modifier=".cg").to(tl.float32)
        else:
            inside = (y < tl.load(row + 3)) & (x < tl.load(row + 4))
            block = tl.load(source + y * down + x * tl.load(row + 6), mask=inside, other=0.0).to(tl.float32)
        peak = tl.maximum(tl.max(tl.max(tl.abs(block), axis=1), axis=0), SMALLEST)
        scale = tl.math.div_rn(peak, LARGEST)  # divides as torch does: Triton's `/` may be off by an ulp
        quantized = (block * tl.math.div_rn(1.0, scale)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        if WHOLE:
            tl.store(place + y * to_down + x, quantized)
        else:
            tl.store(place + y * to_down + x, quantized, mask=(y < tl.load(row + 3)) & (x < tl.load(row + 4)))
        tl.store(scale_place, scale)
