"""Core attention and RMSNorm that Megatron-Core can build a layer of without Transformer Engine.

Megatron's own local modules refuse context parallelism (`DotProductAttention`) and sequence parallelism
(`WrappedTorchNorm`). `CausalAttention` is plain causal attention: rows are padded on the right, so no token ever sees
padding and no padding mask is needed. Imported only where Megatron is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose gradient Megatron sums over tensor-parallel workers under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Causal grouped-query attention; under context parallelism keys and values are gathered, queries stay cut.

    Each context-parallel worker holds two chunks of the sequence, as Megatron cuts it (`zigzag_positions`).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.group = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """`query` [s, b, heads, d], `key` and `value` [s, b, kv_heads, d] -> [s, b, heads * d]."""
        mask = None
        if self.group is not None:
            mask = _causal_mask(query.shape[0], self.group).to(query.device)
            key, value = gather_sequence(key, self.group), gather_sequence(value, self.group)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def zigzag_positions(local: int, size: int, rank: int) -> Tensor:
    """Positions [local] that context-parallel worker `rank` of `size` holds: chunks `rank` and `2 size - 1 - rank`.

    The cut balances causal attention (`get_batch_on_this_cp_rank` in Megatron).
    """
    chunk = local // 2
    steps = torch.arange(chunk)
    return torch.cat([steps + rank * chunk, steps + (2 * size - 1 - rank) * chunk])


def _causal_mask(local: int, group: Any) -> Tensor:
    size = dist.get_world_size(group)
    rows = zigzag_positions(local, size, dist.get_rank(group))
    columns = torch.cat([zigzag_positions(local, size, rank) for rank in range(size)])
    return rows[:, None] >= columns[None, :]


class _GatherSequence(torch.autograd.Function):
    """All-gather along dimension 0; the gradient is summed over the group and cut again."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)  # Gloo has no reduce-scatter
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def gather_sequence(local: Tensor, group: Any) -> Tensor:
    """`local` [s, ...] of every worker of `group`, in rank order [size * s, ...]; differentiable."""
    gathered: Tensor = _GatherSequence.apply(local, group)  # type: ignore[no-untyped-call]
    return gathered
