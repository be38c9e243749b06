"""Attention of packed rows that share prefixes, by two launches of variable-length FlashAttention 2.

One launch is causal within each segment. In the other, the queries after a prefix see its keys, which no sequence has a
copy of. The outputs are joined by their log-sum-exp. The backward pass of FlashAttention computes probabilities from the
log-sum-exp that it is given, and the mean of their gradients from the output (Dao 2023, arXiv:2307.08691, algorithm 2).
Given the joined ones, each launch computes its part of the exact gradients. Imported only where torch is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Sizes = tuple[Tensor, Tensor, int, int]
"""Offsets of queries and keys, and the largest numbers of both in a segment: `Segments.sizes`, possibly rounded up."""


def prefix_attention(query: Tensor, key: Tensor, value: Tensor, own: Sizes, seen: Sizes, scale: float) -> Tensor:
    """Computes attention within segments and to their prefixes.

    `query` [tokens, heads, d], `key` and `value` [tokens, kv_heads, d] -> like `query`. `own` are the sizes of the segments,
    `seen` those of `Segments.prefixes`.
    """
    out: Tensor = FORWARD(query.contiguous(), key.contiguous(), value.contiguous(), *own, *seen, scale)[0]
    return out


_OWN = "Tensor own_starts, Tensor own_key_starts, SymInt own_longest, SymInt own_longest_key"
SIZES = f"{_OWN}, {_OWN.replace('own', 'seen')}, float scale"
INPUTS = "Tensor query, Tensor key, Tensor value"
torch.library.define("dagrl::prefix_attention", f"({INPUTS}, {SIZES}) -> (Tensor, Tensor, Tensor, Tensor)")
torch.library.define(
    "dagrl::prefix_attention_backward",
    f"(Tensor grad, {INPUTS}, Tensor out, Tensor lse, Tensor seed, Tensor offset, {SIZES}) -> (Tensor, Tensor, Tensor)",
)
FORWARD = torch.ops.dagrl.prefix_attention.default
"""The operator, for what chooses by operators. It returns the output, the joined log-sum-exp [heads, queries], and two
states of a dropout of 0."""


@torch.library.register_fake("dagrl::prefix_attention")  # type: ignore[untyped-decorator]
def _outputs(query: Tensor, key: Tensor, value: Tensor, *sizes: Any) -> tuple[Tensor, ...]:
    inputs = query, key, value, *sizes[:4], 0.0, True, False
    return tuple(torch.ops.aten._flash_attention_forward(*inputs, scale=sizes[-1])[:4])


@torch.library.impl("dagrl::prefix_attention", ("cuda", "cpu"))
def _forward(query: Tensor, key: Tensor, value: Tensor, *sizes: Any) -> tuple[Tensor, ...]:
    from dagrl.workers.train.attention_kernels import join_attention

    own, own_lse, *state = _flash_forward(query, key, value, sizes[:4], True, sizes[8])
    seen, seen_lse, *_ = _flash_forward(query, key, value, sizes[4:8], False, sizes[8])
    return *join_attention(own, own_lse, seen, seen_lse), *state


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, sizes: Any, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Returns the output, its log-sum-exp (infinite where no key is seen), and two states of dropout."""
    inputs = query, key, value, *sizes, 0.0, causal, False
    return tuple(torch.ops.aten._flash_attention_forward(*inputs, scale=scale)[:4])


@torch.library.register_fake("dagrl::prefix_attention_backward")  # type: ignore[untyped-decorator]
def _parts(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@torch.library.impl("dagrl::prefix_attention_backward", ("cuda", "cpu"))
def _backward(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    saved, sizes, scale = (grad.contiguous(), *inputs[:7]), inputs[7:15], inputs[15]
    own = _flash_backward(saved, sizes[:4], True, scale)
    seen = _flash_backward(saved, sizes[4:], False, scale)
    return tuple(part.add_(other) for part, other in zip(own, seen, strict=True))


def _flash_backward(saved: tuple[Tensor, ...], sizes: Any, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Returns the part of the gradients of query, key and value that comes through these segments."""
    *tensors, seed, offset = saved
    inputs = *tensors, *sizes, 0.0, causal, seed, offset
    gradients: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(*inputs, scale=scale)
    return gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, starts, key_starts, *longest, seen_starts, seen_key_starts = inputs[:9]
    ctx.set_materialize_grads(False)
    ctx.sizes = longest, inputs[9:]
    ctx.save_for_backward(query, key, value, *output, starts, key_starts, seen_starts, seen_key_starts)


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *saved, starts, key_starts, seen_starts, seen_key_starts = ctx.saved_tensors
    longest, rest = ctx.sizes
    sizes = starts, key_starts, *longest, seen_starts, seen_key_starts, *rest
    return *torch.ops.dagrl.prefix_attention_backward(grad, *saved, *sizes), *[None] * 9


torch.library.register_autograd("dagrl::prefix_attention", _gradients, setup_context=_save)
