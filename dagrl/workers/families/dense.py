"""Dense decoders: Llama, Qwen2 and Qwen2.5 (bias on query, key and value), Qwen3 (per-head norms of queries and keys)."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.refit.slices import WeightSlice
from dagrl.workers.families.family import Family
from dagrl.workers.families.hf_config import ModelConfig
from dagrl.workers.families.megatron import MegatronRank


def megatron_layer(model: ModelConfig, rank: MegatronRank, layer: int, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields attention and MLP, each with the norm before it."""
    yield from megatron_attention(model, rank, hf, local)
    yield rank.norm(
        f"{hf}post_attention_layernorm.weight", f"{local}pre_mlp_layernorm", f"{local}mlp.linear_fc1", model.hidden
    )
    yield from megatron_mlp(model, rank, hf, local)


def megatron_attention(model: ModelConfig, rank: MegatronRank, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields grouped-query attention and the norm before it."""
    qkv = f"{local}self_attention.linear_qkv"
    yield rank.norm(f"{hf}input_layernorm.weight", f"{local}input_layernorm", qkv, model.hidden)
    yield from rank.attention(model, f"{hf}self_attn.", f"{local}self_attention.")


def megatron_mlp(model: ModelConfig, rank: MegatronRank, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields the MLP without its norm."""
    yield from rank.gated_mlp(f"{hf}mlp.", f"{local}mlp.", model.hidden, model.ffn, "the rows of intermediate_size")


FAMILY = Family("dense", ("llama", "qwen2", "qwen3"), megatron_layer)
