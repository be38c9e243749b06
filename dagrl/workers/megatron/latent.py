"""Multi-head latent attention of DeepSeek-V3 in Megatron's local layers (arXiv:2405.04434).

Megatron's own forward pass counts positions from 0 in every row, takes packed rows one at a time, and under tensor
parallelism leaves the gradient of the rotated keys, which all heads share, as each worker's heads give it. Its parameters
stay. Imported only where Megatron is.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from dagrl.workers.megatron.attention import LayerInputs

NORM_EPS = 1e-6  # of the norms of compressed queries, keys and values: transformers has no key for it


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Latent attention of any rows; `packed_seq_params` has the angles of their positions."""

    growth: float
    """By how much rotated queries and keys grow (YaRN)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kv_layernorm.eps = NORM_EPS
        if self.config.q_lora_rank is not None:
            self.q_layernorm.eps = NORM_EPS

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Returns the parts that are built. Megatron 0.19 asks here; else it wants queries' norms in linear layers."""
        parts = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in parts}

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *_: Any, packed_seq_params: LayerInputs, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Returns [s, b, hidden size] of `hidden_states`, and no bias."""
        config, inputs = self.config, packed_seq_params
        if config.q_lora_rank is None:
            queries, _ = self.linear_q_proj(hidden_states)
        else:
            compressed = self._scattered(self._whole(self.linear_q_down_proj(hidden_states)[0], config.q_lora_rank))
            queries, _ = self.linear_q_up_proj(self.q_layernorm(compressed))
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        both = self._whole(self.linear_kv_down_proj(hidden_states)[0], sum(sizes))
        compressed, shared = torch.split(both, sizes, -1)
        others, _ = self.linear_kv_up_proj(self.kv_layernorm(self._scattered(compressed)))
        queries, others = (part.unflatten(-1, (self.num_attention_heads_per_partition, -1)) for part in (queries, others))
        plain, rotated = torch.split(queries, [config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        keys, values = torch.split(others, [config.qk_head_dim, config.v_head_dim], -1)
        shared = copy_to_tensor_model_parallel_region(shared)[:, :, None]  # each worker's heads give a part of its gradient
        shared = self._rotated(shared, inputs).expand(*keys.shape[:3], -1)
        query, key = torch.cat((plain, self._rotated(rotated, inputs)), -1), torch.cat((keys, shared), -1)
        attend = self.core_attention
        if self.checkpoint_core_attention and self.training:
            attend = self._checkpointed_attention_forward
        output: tuple[Tensor, Tensor | None] = self.linear_proj(
            attend(query, key, values, attention_mask, packed_seq_params=inputs)
        )
        return output

    def _whole(self, compressed: Tensor, size: int) -> Tensor:
        """Returns [s, b, size] of all tokens, of which tensor-parallel workers have columns."""
        if compressed.shape[-1] == size:
            return compressed
        whole: Tensor = gather_from_tensor_model_parallel_region(compressed)
        return whole

    def _scattered(self, compressed: Tensor) -> Tensor:
        """Returns this worker's tokens under sequence parallelism."""
        if not self.config.sequence_parallel:
            return compressed
        scattered: Tensor = scatter_to_sequence_parallel_region(compressed)
        return scattered

    def _rotated(self, states: Tensor, inputs: LayerInputs) -> Tensor:
        """Rotates pairs of neighbouring dimensions of `states` [s, b, heads, rotated]; first the first of all pairs."""
        assert inputs.angles is not None
        cos, sin = ((part * self.growth).to(states.dtype) for part in (inputs.angles.cos(), inputs.angles.sin()))
        first, second = states[..., 0::2], states[..., 1::2]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
