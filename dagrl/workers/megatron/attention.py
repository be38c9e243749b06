"""Core attention and RMSNorm for Megatron-Core layers without Transformer Engine.

Megatron's local modules do not support context parallelism and packed sequences (`DotProductAttention`) or sequence
parallelism (`WrappedTorchNorm`). Rows of one sequence each use torch's causal attention: they are padded on the right, so no
token sees padding and no mask is needed. Packed rows and rows split over context-parallel workers come with `Segments`. In
half precision on a GPU, flash attention or cuDNN processes all segments in one launch; elsewhere torch's attention processes
them one by one. Imported only where Megatron is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dagrl.workers.train.cudnn_attention import cudnn_attention, faster
from dagrl.workers.train.microbatches import Microbatch, RoutedTokens, Segments
from dagrl.workers.train.prefix_attention import prefix_attention


@dataclass(frozen=True)
class LayerInputs:
    """Passed through Megatron to every layer as `packed_seq_params`, of which it reads the two class variables.

    `segments` is None if every row is one sequence, `routed` in models without experts. `angles` [s, 1, 1, rotated / 2] of
    latent attention: Megatron passes those of other attention by itself.
    """

    qkv_format: ClassVar[str] = "sbhd"  # Megatron rotates and reshapes as for other microbatches
    cp_group: ClassVar[None] = None

    segments: Segments | None
    routed: RoutedTokens | None
    angles: Tensor | None = None

    @staticmethod
    def of(microbatch: Microbatch) -> LayerInputs | None:
        """Returns the layers' inputs in addition to hidden states; None if there are none."""
        needed = microbatch.segments or microbatch.routed
        return LayerInputs(microbatch.segments, microbatch.routed) if needed else None


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose gradient Megatron sums over tensor-parallel workers under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: Tensor) -> Tensor:
        """Normalizes `states` [..., hidden size]. GPUs use our own kernel, because torch's is slow for many short rows."""
        if not states.is_cuda:
            return super().forward(states)
        from dagrl.workers.megatron.triton_kernels import rms_norm

        assert self.eps is not None
        return rms_norm(states, self.weight, self.eps)


class NormedHeads(SelfAttention):  # type: ignore[misc]
    """Attention whose queries and keys are normalized. On GPUs one kernel also splits and rotates them."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *_: Any, rotary_pos_emb: Any = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Returns [s, b, hidden size] of `hidden_states`, and no bias. `rotary_pos_emb`: angles [s, 1, 1, rotated]."""
        whole = rotary_pos_emb is not None and rotary_pos_emb.shape[-1] == self.hidden_size_per_attention_head
        # Tensor-parallel workers that share a key choose their queries in Megatron's own code.
        own_keys = self.config.num_query_groups >= parallel_state.get_tensor_model_parallel_world_size()
        self._angles = rotary_pos_emb if hidden_states.is_cuda and whole and own_keys else None
        rotates = None if self._angles is not None else rotary_pos_emb
        out: tuple[Tensor, Tensor | None] = super().forward(hidden_states, attention_mask, rotary_pos_emb=rotates, **options)
        return out

    def get_query_key_value_tensors(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Any:
        """Returns queries [s, b, heads, d], and keys and values [s, b, kv_heads, d]."""
        if self._angles is None:
            return super().get_query_key_value_tensors(hidden_states, *inputs, **options)
        from dagrl.workers.megatron.triton_kernels import split_heads

        mixed, _ = super().get_query_key_value_tensors(hidden_states, *inputs, **options | {"split_qkv": False})
        norms = self.q_layernorm.weight, self.k_layernorm.weight
        return split_heads(mixed, norms, self.q_layernorm.eps, self._angles)


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Causal grouped-query attention. Under context parallelism keys and values are gathered, queries stay split.

    With a `window` a token sees that many tokens, itself included, by torch's attention of one segment after another.
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
        self.layer = layer_number - 1
        self.window: int | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: LayerInputs | None = None,
        **_: Any,
    ) -> Tensor:
        """`query` [s, b, heads, d], `key` and `value` [s, b, kv_heads, d] -> [s, b, heads * d].

        With latent attention values are shorter: zeros fill them up, as kernels take one size, and are cut off the result.
        """
        if (size := value.shape[-1]) < query.shape[-1]:
            filled = torch.nn.functional.pad(value, (0, query.shape[-1] - size))
            out = self.forward(query, key, filled, attention_mask, packed_seq_params=packed_seq_params)
            return out.view(*query.shape[:3], -1)[..., :size].flatten(2)
        segments = None if packed_seq_params is None else packed_seq_params.segments
        if segments is None:
            assert self.group is None, "context parallelism needs segments"
            q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            return _attend(q, k, v, self.scale, self.window).permute(2, 0, 1, 3).flatten(2)
        tokens, rows = query.shape[:2]
        q, k, v = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        if segments.key_order is not None:
            both = gather_from_sequence_parallel_region(torch.stack((k, v), dim=1), group=self.group)
            k, v = both.index_select(0, segments.key_order).unbind(1)
        if self.window is None:
            out = segment_attention(q, k, v, segments, self.scale)
        else:
            out = each_segment(q, k, v, segments, self.scale, self.window)
        return out.view(rows, tokens, -1).transpose(0, 1)


def segment_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Computes attention within segments.

    `query` [queries, heads, d], `key` and `value` [keys, kv_heads, d] -> like `query`.
    """
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda and half and query.shape[-1] <= 256 and torch.backends.cuda.is_flash_attention_available():
        # Variable-length FlashAttention 2: differentiable, causal from the end of each segment.
        if segments.prefixes is not None:
            return prefix_attention(query, key, value, segments.sizes, segments.prefixes.sizes, scale)
        if faster(query, segments.rounded_key):
            sizes = segments.rounded_sizes
            return cudnn_attention(query, key, value, *sizes, scale, from_end=segments.key_order is not None)
        settings = {"dropout_p": 0.0, "is_causal": True, "return_debug_mask": False, "scale": scale}
        out: Tensor = torch.ops.aten._flash_attention_forward(query, key, value, *segments.sizes, **settings)[0]
        return out
    return each_segment(query, key, value, segments, scale)


def each_segment(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, window: int | None = None
) -> Tensor:
    """Computes `segment_attention` by torch's attention, one segment after another."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))  # [1, heads, tokens, d]
    keys_values = [_seen(torch.split(tensor, list(segments.key_lengths), 2), segments.heads) for tensor in (k, v)]
    parts = zip(torch.split(q, list(segments.query_lengths), 2), *keys_values, strict=True)
    return torch.cat([_attend(part_q, part_k, part_v, scale, window)[0].transpose(0, 1) for part_q, part_k, part_v in parts])


def _seen(parts: Sequence[Tensor], heads: Sequence[int]) -> Sequence[Tensor]:
    """Returns the keys or values that each segment sees: its prefix's, and its own."""
    if not heads:
        return parts
    return [torch.cat((parts[head], own), 2) if head >= 0 else own for own, head in zip(parts, heads, strict=True)]


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Computes attention, causal from the end. `query` [b, heads, q, d], `key` and `value` [b, kv_heads, k, d]; q <= k."""
    (heads, queries), (kv_heads, keys) = query.shape[1:3], key.shape[1:3]
    if queries == keys and (window is None or window >= keys):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=heads != kv_heads)
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    if window is not None:
        mask = mask.triu(keys - queries - window + 1)
    if query.is_cuda and query.dtype is not torch.float32:
        # cuDNN, which torch prefers on Hopper, gives wrong gradients with a mask where there are more keys than queries.
        key, value = (tensor.repeat_interleave(heads // kv_heads, 1) for tensor in (key, value))
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=heads != kv_heads)
