"""Attention of packed rows that share prefixes, by two launches of variable-length FlashAttention 2.

One launch is causal within each segment. In the other, the queries after a prefix see its keys, which no sequence has a copy
of. The outputs are joined by their log-sum-exp. The backward pass of FlashAttention computes probabilities from the
log-sum-exp that it is given, and the mean of their gradients from the output (Dao 2023, arXiv:2307.08691, algorithm 2).
Given the joined ones, each launch computes its part of the exact gradients. Imported only where Triton is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

from dagrl.workers.train.segments import Segments

JOINED_ROWS = 32  # pairs of a token and a head that a program joins


def prefix_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Attention within segments and to their prefixes.

    `query` [tokens, heads, d], `key` and `value` [tokens, kv_heads, d], in half precision on a GPU -> like `query`.
    """
    out: Tensor = _PrefixAttention.apply(query, key, value, segments, scale)  # type: ignore[no-untyped-call]
    return out


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
        assert segments.prefixes is not None
        own, own_lse, *state = _forward(query, key, value, segments, True, scale)
        seen, seen_lse, *_ = _forward(query, key, value, segments.prefixes, False, scale)
        out, lse = join(own, own_lse, seen, seen_lse)
        ctx.save_for_backward(query, key, value, out, lse, *state)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, segments = (grads[0].contiguous(), *ctx.saved_tensors), ctx.segments
        own = _backward(saved, segments, True, ctx.scale)
        seen = _backward(saved, segments.prefixes, False, ctx.scale)
        return *(part.add_(other) for part, other in zip(own, seen, strict=True)), None, None


def _forward(query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool, scale: float) -> list[Tensor]:
    """Returns the output, its log-sum-exp [heads, tokens] (infinite where no key is seen), and two states of dropout."""
    inputs = query, key, value, *segments.sizes, 0.0, causal, False
    return list(torch.ops.aten._flash_attention_forward(*inputs, scale=scale)[:4])


def _backward(saved: tuple[Tensor, ...], segments: Segments, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Returns the part of the gradients of query, key and value that comes through these segments."""
    *tensors, first, second = saved
    inputs = *tensors, *segments.sizes, 0.0, causal, first, second
    gradients: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(*inputs, scale=scale)
    return gradients


def join(own: Tensor, own_lse: Tensor, seen: Tensor, seen_lse: Tensor) -> tuple[Tensor, Tensor]:
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
