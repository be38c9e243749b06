"""Dense decoders: Llama, Qwen2 and Qwen2.5 (bias on query, key and value), Qwen3 (per-head norms of queries and keys)."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.refit.slices import WeightSlice
from dagrl.workers.families.family import Family
from dagrl.workers.families.hf_config import ModelConfig
from dagrl.workers.families.megatron import MegatronRank, replicated
from dagrl.workers.families.vllm import VllmRank
from dagrl.workers.families.vllm import replicated as vllm_replicated


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
    names = (f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight", f"{hf}mlp.down_proj.weight")
    yield from rank.gated_mlp(names, f"{local}mlp.", model.hidden, model.ffn, "the rows of intermediate_size")


def megatron_moe_norm(model: ModelConfig, hf: str, local: str) -> WeightSlice:
    """Returns the norm before experts, which is never fused."""
    return replicated(f"{hf}post_attention_layernorm.weight", f"{local}pre_mlp_layernorm.weight", model.hidden)


def vllm_layer(model: ModelConfig, rank: VllmRank, layer: int, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields attention, MLP and both norms."""
    yield from vllm_attention(model, rank, hf, local)
    yield from vllm_mlp(model, rank, hf, local)


def vllm_attention(model: ModelConfig, rank: VllmRank, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields grouped-query attention and both norms."""
    output_bias = model.type == "llama" and model.qkv_bias
    yield from rank.attention(model, f"{hf}self_attn.", f"{local}self_attn.", output_bias=output_bias)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield vllm_replicated(f"{hf}{norm}.weight", model.hidden, tensor=f"{local}{norm}.weight")


def vllm_mlp(model: ModelConfig, rank: VllmRank, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields the MLP without its norm."""
    bias = "bias" if model.type == "llama" and model.flag("mlp_bias") else ""
    yield from rank.gated_mlp(f"{hf}mlp.", f"{local}mlp.", model.hidden, model.ffn, bias)


FAMILY = Family("dense", ("llama", "qwen2", "qwen3"), megatron_layer, vllm_layer)
