"""Attention of segments by Transformer Engine.

Parameters stay those of Megatron's local layers, so checkpoints, refits and adapters do not depend on it.
`dagrl.workers.megatron.kernels` decides what is used. Imported only where Transformer Engine is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from transformer_engine.pytorch import DotProductAttention

from dagrl.workers.megatron import attention
from dagrl.workers.train.microbatches import Segments

LEAST_WORK = 1 << 29
"""Products of a query and a key, over all heads, from which on its attention is faster than FlashAttention 2 on an H200."""
LARGEST_HEAD = 128  # values of a head, for the backward pass


def segment_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Computes attention within segments, as `attention.segment_attention`.

    Segments that share prefixes take FlashAttention 2, and so do heads that cuDNN does not take.
    """
    if segments.prefixes is not None or query.shape[-1] > LARGEST_HEAD or query.shape[-1] % 8:
        return attention.segment_attention(query, key, value, segments, scale)
    out: Tensor = _attention(*query.shape[1:], key.shape[1], scale)(
        query,
        key,
        value,
        attn_mask_type="padding_causal" if segments.key_order is None else "padding_causal_bottom_right",
        cu_seqlens_q=segments.query_starts,
        cu_seqlens_kv=segments.key_starts,
        max_seqlen_q=segments.longest_query,
        max_seqlen_kv=segments.longest_key,
        pad_between_seqs=False,
    )
    return out.view_as(query)


def faster_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Computes `segment_attention`, by FlashAttention 2 where that is faster."""
    work = query.shape[0] * query.shape[1] * segments.rounded_key
    chosen = segment_attention if work >= LEAST_WORK else attention.segment_attention
    return chosen(query, key, value, segments, scale)


@cache
def _attention(heads: int, size: int, kv_heads: int, scale: float) -> Any:
    """Returns the attention module of these sizes, which all layers share because it has no parameters."""
    return DotProductAttention(heads, size, kv_heads, qkv_format="thd", softmax_scale=scale)
