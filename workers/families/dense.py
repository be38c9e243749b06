"""Dense decoders: Llama, Qwen2 and Qwen2.5 (bias on query, key and value), Qwen3 (queries and keys normalised per head)."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.refit.slices import WeightSlice
from workers.families.megatron import MegatronRank, whole
from workers.families.model import Family, Model
from workers.families.vllm import VllmRank
from workers.families.vllm import whole as vllm_whole


def megatron_layer(model: Model, rank: MegatronRank, layer: int, hf: str, local: str) -> Iterator[WeightSlice]:
    """Attention and MLP, each after its norm."""
    yield from megatron_attention(model, rank, hf, local)
    yield rank.norm(
        f"{hf}post_attention_layernorm.weight", f"{local}pre_mlp_layernorm", f"{local}mlp.linear_fc1", model.hidden
    )
    yield from megatron_mlp(model, rank, hf, local)


def megatron_attention(model: Model, rank: MegatronRank, hf: str, local: str) -> Iterator[WeightSlice]:
    """Grouped-query attention after its norm."""
    qkv = f"{local}self_attention.linear_qkv"
    yield rank.norm(f"{hf}input_layernorm.weight", f"{local}input_layernorm", qkv, model.hidden)
    yield from rank.attention(model, f"{hf}self_attn.", f"{local}self_attention.")


def megatron_mlp(model: Model, rank: MegatronRank, hf: str, local: str) -> Iterator[WeightSlice]:
    """The MLP without its norm."""
    names = (f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight", f"{hf}mlp.down_proj.weight")
    yield from rank.gated_mlp(names, f"{local}mlp.", model.hidden, model.ffn, "the rows of intermediate_size")


def megatron_moe_norm(model: Model, hf: str, local: str) -> WeightSlice:
    """The norm before experts, which is never fused."""
    return whole(f"{hf}post_attention_layernorm.weight", f"{local}pre_mlp_layernorm.weight", model.hidden)


def vllm_layer(model: Model, rank: VllmRank, layer: int, hf: str, local: str) -> Iterator[WeightSlice]:
    """Attention, MLP and both norms."""
    yield from vllm_attention(model, rank, hf, local)
    yield from vllm_mlp(model, rank, hf, local)


def vllm_attention(model: Model, rank: VllmRank, hf: str, local: str) -> Iterator[WeightSlice]:
    """Grouped-query attention and both norms."""
    output_bias = model.type == "llama" and model.qkv_bias
    yield from rank.attention(model, f"{hf}self_attn.", f"{local}self_attn.", output_bias=output_bias)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield vllm_whole(f"{hf}{norm}.weight", model.hidden, tensor=f"{local}{norm}.weight")


def vllm_mlp(model: Model, rank: VllmRank, hf: str, local: str) -> Iterator[WeightSlice]:
    """The MLP without its norm."""
    bias = "bias" if model.type == "llama" and model.flag("mlp_bias") else ""
    yield from rank.gated_mlp(f"{hf}mlp.", f"{local}mlp.", model.hidden, model.ffn, bias)


FAMILY = Family("dense", ("llama", "qwen2", "qwen3"), megatron_layer, vllm_layer)
