"""Decoders with grouped-query attention, dense or with experts.

Llama, Qwen2 and Qwen2.5 (bias on query, key and value), Qwen3 (per-head norms of queries and keys). With experts: Qwen3-MoE,
Qwen2-MoE (a gated shared expert), Mixtral, GLM-4.5 (shared experts, a router with sigmoid scores and an expert bias).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dagrl.refit.slices import WeightSlice
from dagrl.workers.families.hf_config import ModelConfig
from dagrl.workers.families.megatron import Family, MegatronRank, replicated


def dense_layer(model: ModelConfig, rank: MegatronRank, layer: int, hf: str, local: str) -> Iterator[WeightSlice]:
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


@dataclass(frozen=True)
class Experts:
    """Sizes of a model's expert layers, and their names in its checkpoint.

    `bias`: the router chooses by sigmoid scores and a bias of each expert (`noaux_tc`, arXiv:2408.15664), and weights by the
    scores alone.
    """

    count: int
    width: int
    block: str  # name of the block: `mlp.`, in Mixtral `block_sparse_moe.`
    shared: str = "shared_expert."
    shared_width: int = 0
    bias: bool = False
    shared_gate: bool = False
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


def experts_of(model: ModelConfig) -> Experts:
    """Reads the experts of a model.

    Transformers 5 writes `num_local_experts` for Qwen3-MoE; earlier versions and published checkpoints have `num_experts`.
    """
    if model.type == "mixtral":
        return Experts(model.size("num_local_experts", least=1), model.ffn, "block_sparse_moe.", parts=("w1", "w3", "w2"))
    width = model.size("moe_intermediate_size", least=1)
    if model.type == "glm4_moe":
        shared = width * model.size("n_shared_experts")
        return Experts(model.size("n_routed_experts", least=1), width, "mlp.", "shared_experts.", shared, bias=True)
    count = model.size("num_experts" if model.has("num_experts") else "num_local_experts", least=1)
    if model.type == "qwen2_moe":
        shared = model.size("shared_expert_intermediate_size")
        return Experts(count, width, "mlp.", shared_width=shared, shared_gate=bool(shared))
    return Experts(count, width, "mlp.")


def has_experts(model: ModelConfig, layer: int) -> bool:
    """Whether a layer has experts: every `decoder_sparse_step`-th layer except `mlp_only_layers`, or all but the first.

    As in transformers' Qwen3MoeDecoderLayer and Glm4MoeDecoderLayer. Mixtral has none of the keys, and experts in every
    layer.
    """
    if model.type == "glm4_moe":
        return layer >= model.size("first_k_dense_replace")
    without = model.config.get("mlp_only_layers") or []
    assert isinstance(without, list)
    return layer not in without and (layer + 1) % model.size("decoder_sparse_step", 1, least=1) == 0


def moe_layer(model: ModelConfig, rank: MegatronRank, layer: int, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields a dense layer with router, experts and shared experts instead of the MLP."""
    if not has_experts(model, layer):
        yield from dense_layer(model, rank, layer, hf, local)
        return
    yield from megatron_attention(model, rank, hf, local)
    yield from megatron_experts(model, rank, experts_of(model), hf, local)


def megatron_experts(model: ModelConfig, rank: MegatronRank, experts: Experts, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields router, experts and shared experts, and the norm before them, which is never fused."""
    block = f"{hf}{experts.block}"
    yield replicated(f"{hf}post_attention_layernorm.weight", f"{local}pre_mlp_layernorm.weight", model.hidden)
    yield replicated(f"{block}gate.weight", f"{local}mlp.router.weight", experts.count, model.hidden)
    if experts.bias:
        name = f"{block}gate.e_score_correction_bias"
        yield replicated(name, f"{local}mlp.router.expert_bias", experts.count, dtype="float32")
    names = tuple(f"{block}experts.*.{part}.weight" for part in experts.parts)
    what = "the rows of an expert's intermediate size"
    yield from rank.experts(names, f"{local}mlp.experts.", experts.count, model.hidden, experts.width, what)
    if experts.shared_width:
        shared, to = f"{block}{experts.shared}", f"{local}mlp.shared_experts."
        yield from rank.gated_mlp(shared, to, model.hidden, experts.shared_width, "the rows of the shared experts")
        if experts.shared_gate:
            yield replicated(f"{block}shared_expert_gate.weight", f"{to}gate_weight", 1, model.hidden)


DENSE = Family("dense", ("llama", "mistral", "qwen2", "qwen3"), dense_layer)
MOE = Family("moe", ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe"), moe_layer)
