"""Triton kernels of log-probabilities: one pass over a chunk of logits forward, and one backward.

Plain torch reads or writes a chunk eight times in the forward pass. These kernels read it once, and write its gradient in
half precision in the backward pass. Import this module only with a GPU: Triton comes with torch's CUDA builds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_COLUMNS = 4096  # columns per tile
_WARPS = 8


def chunk_sums(logits: Tensor, columns: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's maximum [n] of float32 `logits` [n, size], and the sums [3, n] of `logprobs._chunk_sums`.

    `columns` [n] is the column of each label, `inside` [n] whether this worker has it.
    """
    highest, sums = logits.new_empty(len(logits)), logits.new_empty(3, len(logits))
    _row_sums[(len(logits),)](
        logits,
        columns,
        inside,
        highest,
        sums,
        len(logits),
        logits.shape[1],
        logits.stride(0),
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return highest, sums


def logit_gradients(
    logits: Tensor, normaliser: Tensor, scale: Tensor, columns: Tensor, inside: Tensor, dtype: torch.dtype
) -> Tensor:
    """Returns `scale` times the gradient of the labels' log-probabilities by the logits, [n, size] in `dtype`."""
    import torch

    grad = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    grid = (len(logits), triton.cdiv(logits.shape[1], _COLUMNS))
    _row_gradients[grid](
        logits,
        grad,
        normaliser,
        scale,
        columns,
        inside,
        logits.shape[1],
        logits.stride(0),
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return grad


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _row_sums(logits, columns, inside, highest, sums, rows, size, stride, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row per program. Online softmax sums (Milakov and Gimelshein 2018, arXiv:1805.02867)."""
    row = tl.program_id(0).to(tl.int64)
    top = -1.0e30
    total = 0.0
    weighted = 0.0
    for start in range(0, size, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        here = at < size
        values = tl.load(logits + row * stride + at, mask=here, other=-1.0e30)
        higher = tl.maximum(top, tl.max(values, 0))
        relative = values - higher
        exponentials = tl.where(here, tl.exp(relative), 0.0)
        shift = top - higher
        factor = tl.exp(shift)
        weighted = (weighted + total * shift) * factor + tl.sum(tl.where(here, exponentials * relative, 0.0), 0)
        total = total * factor + tl.sum(exponentials, 0)
        top = higher
    label = tl.load(columns + row)
    value = tl.load(logits + row * stride + label)
    tl.store(highest + row, top)
    tl.store(sums + row, total)
    tl.store(sums + rows + row, weighted)
    tl.store(sums + 2 * rows + row, tl.where(tl.load(inside + row), value, 0.0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _row_gradients(logits, grad, normaliser, scale, columns, inside, size, stride, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tile of a row per program: `scale * ([is the label] - probability)`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = at < size
    values = tl.load(logits + row * stride + at, mask=here, other=-1.0e30)
    probability = tl.exp(values - tl.load(normaliser + row))
    label = tl.where(tl.load(inside + row), tl.load(columns + row), -1)
    value = tl.load(scale + row) * (tl.where(at == label, 1.0, 0.0) - probability)
    tl.store(grad + row * size + at, value.to(grad.dtype.element_ty), mask=here)
