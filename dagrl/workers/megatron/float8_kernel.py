"""Triton kernel that quantizes a matrix to FP8 in both memory orders, reading it once. Imported only where Triton is."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

ROWS, COLUMNS = 128, 64  # of a tile


def quantize_to(rows: Tensor, columns: Tensor, matrix: Tensor, scale: Tensor) -> None:
    """Writes `matrix` [n, m] over `scale` to `rows` [n, m] and `columns` [m, at least n], and zeros after it.

    An empty `rows` or `columns` is left out.
    """
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    length, width = matrix.shape
    longest = columns.shape[1] if columns.numel() else length
    grid = triton.cdiv(longest, ROWS), triton.cdiv(width, COLUMNS)
    written = rows.numel() > 0, columns.numel() > 0
    _quantize_kernel[grid](rows, columns, matrix, scale, length, longest, width, matrix.stride(0), *written, ROWS, COLUMNS)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _quantize_kernel(  # type: ignore[no-untyped-def]
    rows,
    columns,
    matrix,
    scale,
    length,
    longest,
    width,
    stride,
    to_rows: tl.constexpr,
    to_columns: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows))[:, None]
    column = (tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns))[None, :]
    inside = (row < length) & (column < width)
    value = tl.load(matrix + row * stride + column, mask=inside, other=0.0).to(tl.float32) * tl.math.div_rn(
        1.0, tl.load(scale)
    )
    if to_rows:
        tl.store(rows + row * width + column, value.to(rows.dtype.element_ty), mask=inside)
    if to_columns:
        target = columns + column * longest + row
        tl.store(target, value.to(columns.dtype.element_ty), mask=(row < longest) & (column < width))
