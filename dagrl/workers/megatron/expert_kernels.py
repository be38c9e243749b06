"""Triton kernels for experts: the sum of each token's rows, and zeros for experts without rows. Only where Triton is."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

SUM_BLOCK = 1024  # columns of a program
ZERO_BLOCK = 4096  # elements of a program


def sum_rows_on_gpu(states: Tensor, rows: Tensor) -> Tensor:
    """Sums the `rows` [tokens, k] of `states` [n, width] in float32 for each token -> [tokens, width]."""
    (tokens, chosen), width = rows.shape, states.shape[1]
    total = states.new_empty(tokens, width)
    block = min(SUM_BLOCK, triton.next_power_of_2(width))
    if tokens:
        _sum_kernel[(tokens, triton.cdiv(width, block))](states, rows, total, width, chosen, block)
    return total


def clear_empty(matrices: Tensor, offsets: Tensor) -> None:
    """Fills the matrices [experts, n, m] of experts without rows with zeros. Rows of experts end at `offsets` [experts]."""
    elements = matrices[0].numel()
    _clear_kernel[(len(matrices), triton.cdiv(elements, ZERO_BLOCK))](matrices, offsets, elements, ZERO_BLOCK)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sum_kernel(states, rows, total, width, chosen: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    found = tl.zeros((block,), dtype=tl.float32)
    for number in tl.static_range(chosen):
        row = tl.load(rows + token * chosen + number)
        found += tl.load(states + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + token * width + column, found.to(total.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _clear_kernel(matrices, offsets, elements, block: tl.constexpr):  # type: ignore[no-untyped-def]
    expert = tl.program_id(0)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    if start == tl.load(offsets + expert):
        at = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
        zeros = tl.zeros((block,), dtype=matrices.dtype.element_ty)
        tl.store(matrices + expert.to(tl.int64) * elements + at, zeros, mask=at < elements)
