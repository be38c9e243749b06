"""A Triton kernel that joins the attention to two sets of keys. Imported only where Triton is."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

JOINED_ROWS = 32  # pairs of a token and a head that a program joins


def join_attention(own: Tensor, own_lse: Tensor, seen: Tensor, seen_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the attention [tokens, heads, d] to two sets of keys, given the log-sum-exp [heads, tokens] of each.

    Where `seen_lse` is infinite, nothing was seen.
    """
    tokens, heads, size = own.shape
    own, seen = own.contiguous(), seen.contiguous()
    out, lse = torch.empty_like(own), torch.empty_like(own_lse)
    grid = (triton.cdiv(tokens * heads, JOINED_ROWS),)
    padded = triton.next_power_of_2(size)
    _join_kernel[grid](own, own_lse, seen, seen_lse, out, lse, tokens, heads, size, padded, JOINED_ROWS)
    return out, lse


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _join_kernel(  # type: ignore[no-untyped-def]
    own, own_lse, seen, seen_lse, out, lse, tokens, heads, size: tl.constexpr, padded: tl.constexpr, rows: tl.constexpr
):
    row = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)
    inside = row < tokens * heads
    place = row % heads * tokens + row // heads
    first = tl.load(own_lse + place, mask=inside, other=0.0)
    second = tl.load(seen_lse + place, mask=inside, other=0.0)
    sees = (second < float("inf")) & (second > float("-inf"))
    second = tl.where(sees, second, float("-inf"))
    highest = tl.maximum(first, second)
    total = highest + tl.log(tl.exp(first - highest) + tl.exp(second - highest))
    tl.store(lse + place, total, mask=inside)
    column = tl.arange(0, padded)[None, :]
    entry = row[:, None] * size + column
    mask = inside[:, None] & (column < size)
    mine = tl.load(own + entry, mask=mask, other=0.0).to(tl.float32) * tl.exp(first - total)[:, None]
    others = tl.load(seen + entry, mask=mask & sees[:, None], other=0.0).to(tl.float32) * tl.exp(second - total)[:, None]
    tl.store(out + entry, (mine + others).to(out.dtype.element_ty), mask=mask)
