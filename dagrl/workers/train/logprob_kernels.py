"""Triton kernels of log-probabilities: one pass over a chunk of logits forward, and one backward.

Plain torch reads or writes a chunk eight times in the forward pass. These kernels read it once, may keep its exponentials in
half precision, and write its gradient in half precision in the backward pass. Import this module only with a GPU: Triton
comes with torch's CUDA builds.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

TILE = 4096  # columns that a program reads at a time
_WARPS = 8


def chunk_sums(logits: Tensor, columns: Tensor, inside: Tensor, kept: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Returns each row's maximum [n] of float32 `logits` [n, size], and the sums [3, n] of `logprobs._chunk_sums`.

    `columns` [n] is the column of each label, `inside` [n] whether this worker has it. Fills `kept`: values and tops.
    """
    highest, sums = logits.new_empty(len(logits)), logits.new_empty(3, len(logits))
    values, tops = kept or (logits, logits)
    tensors = logits, columns, inside, highest, sums, values, tops
    strides = logits.stride(0), values.stride(0), tops.stride(0)
    _row_sums[(len(logits),)](*tensors, *logits.shape, *strides, KEEP=kept is not None, COLUMNS=TILE, num_warps=_WARPS)
    return highest, sums


def logit_gradients(
    source: Tensor,
    tops: Tensor | None,
    normaliser: Tensor,
    scale: Tensor,
    labels: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Computes `logprobs._logit_gradients` of logits, or of exponentials if they have `tops`: gradients take their place."""
    kept = tops is not None
    tops = normaliser[:, None] if tops is None else tops
    grad = source if kept else torch.empty(source.shape, dtype=dtype, device=source.device)
    grid = (len(source), triton.cdiv(source.shape[1], TILE))
    tensors = source, grad, normaliser, tops, scale, *labels
    sizes = source.shape[1], source.stride(0), grad.stride(0), tops.stride(0)
    _row_gradients[grid](*tensors, *sizes, KEPT=kept, COLUMNS=TILE, num_warps=_WARPS)
    return grad


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _row_sums(  # type: ignore[no-untyped-def]
    logits,
    columns,
    inside,
    highest,
    sums,
    kept,
    tops,
    rows,
    size,
    stride,
    kept_stride,
    tops_stride,
    KEEP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One row per program. Online softmax sums (Milakov and Gimelshein 2018, arXiv:1805.02867)."""
    row = tl.program_id(0).to(tl.int64)
    place, top = tl.arange(0, COLUMNS), -1.0e30
    total = tl.zeros((COLUMNS,), tl.float32)  # of each place in a tile, so that a tile has one reduction
    weighted = total
    ahead = tl.load(logits + row * stride + place, mask=place < size, other=-1.0e30)
    for start in range(0, size, COLUMNS):
        values, at = ahead, start + place
        ahead = tl.load(logits + row * stride + at + COLUMNS, mask=at + COLUMNS < size, other=-1.0e30)
        higher = tl.maximum(top, tl.max(values, 0))
        relative = values - higher
        exponentials = tl.where(at < size, tl.exp(relative), 0.0)
        if KEEP:
            tl.store(kept + row * kept_stride + at, exponentials.to(kept.dtype.element_ty), mask=at < size)
            tl.store(tops + row * tops_stride + start // COLUMNS, higher)
        shift = top - higher
        factor = tl.exp(shift)
        weighted = (weighted + total * shift) * factor + tl.where(at < size, exponentials * relative, 0.0)
        total = total * factor + exponentials
        top = higher
    label = tl.load(columns + row)
    value = tl.load(logits + row * stride + label)
    tl.store(highest + row, top)
    tl.store(sums + row, tl.sum(total, 0))
    tl.store(sums + rows + row, tl.sum(weighted, 0))
    tl.store(sums + 2 * rows + row, tl.where(tl.load(inside + row), value, 0.0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _row_gradients(  # type: ignore[no-untyped-def]
    source,
    grad,
    normaliser,
    tops,
    scale,
    columns,
    inside,
    of_label,
    size,
    stride,
    grad_stride,
    tops_stride,
    KEPT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile of a row per program: `scale * ([is the label] - probability)`. `grad` may be `source`."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * COLUMNS + tl.arange(0, COLUMNS)
    here = at < size
    values = tl.load(source + row * stride + at, mask=here, other=0.0).to(tl.float32)
    base = tl.load(normaliser + row)
    if KEPT:
        probability = values * tl.exp(tl.load(tops + row * tops_stride + tile) - base)
    else:
        probability = tl.exp(values - base)
    label = tl.where(tl.load(inside + row), tl.load(columns + row), -1)
    value = tl.load(scale + row) * tl.where(at == label, tl.load(of_label + row), -probability)
    tl.store(grad + row * grad_stride + at, value.to(grad.dtype.element_ty), mask=here)
