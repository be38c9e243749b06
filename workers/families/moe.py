"""Mixture of experts with grouped-query attention: Qwen3-MoE, Qwen2-MoE (a gated shared expert), Mixtral."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dagrl.refit.slices import WeightSlice
from dagrl.workers.families import dense
from dagrl.workers.families.family import Family
from dagrl.workers.families.hf_config import ModelConfig
from dagrl.workers.families.megatron import MegatronRank, replicated


@dataclass(frozen=True)
class Experts:
    """Sizes of a model's expert layers, and their names in its checkpoint."""

    count: int
    width: int
    block: str  # name of the block: `mlp.`, in Mixtral `block_sparse_moe.`
    parts: tuple[str, str, str]  # gate, up, down
    shared_width: int = 0


def experts_of(model: ModelConfig) -> Experts:
    """Reads the experts of a model.

    Transformers 5 writes `num_local_experts` for Qwen3-MoE; earlier versions and published checkpoints have `num_experts`.
    """
    if model.type == "mixtral":
        return Experts(model.size("num_local_experts", least=1), model.ffn, "block_sparse_moe.", ("w1", "w3", "w2"))
    count = model.size("num_experts" if model.has("num_experts") else "num_local_experts", least=1)
    shared = model.size("shared_expert_intermediate_size") if model.type == "qwen2_moe" else 0
    width = model.size("moe_intermediate_size", least=1)
    return Experts(count, width, "mlp.", ("gate_proj", "up_proj", "down_proj"), shared)


def has_experts(model: ModelConfig, layer: int) -> bool:
    """Whether a layer has experts: every `decoder_sparse_step`-th layer except `mlp_only_layers`.

    As in transformers' Qwen3MoeDecoderLayer. Mixtral has neither key, and experts in every layer.
    """
    without = model.config.get("mlp_only_layers") or []
    assert isinstance(without, list)
    return layer not in without and (layer + 1) % model.size("decoder_sparse_step", 1, least=1) == 0


def megatron_layer(model: ModelConfig, rank: MegatronRank, layer: int, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields a dense layer with router, experts and shared expert instead of the MLP."""
    if not has_experts(model, layer):
        yield from dense.megatron_layer(model, rank, layer, hf, local)
        return
    experts = experts_of(model)
    block = f"{hf}{experts.block}"
    yield from dense.megatron_attention(model, rank, hf, local)
    yield dense.megatron_moe_norm(model, hf, local)
    yield replicated(f"{block}gate.weight", f"{local}mlp.router.weight", experts.count, model.hidden)
    names = tuple(f"{block}experts.*.{part}.weight" for part in experts.parts)
    what = "the rows of an expert's intermediate size"
    yield from rank.experts(names, f"{local}mlp.experts.", experts.count, model.hidden, experts.width, what)
    if experts.shared_width:
        shared, to = f"{block}shared_expert.", f"{local}mlp.shared_experts."
        names = (f"{shared}gate_proj.weight", f"{shared}up_proj.weight", f"{shared}down_proj.weight")
        yield from rank.gated_mlp(names, to, model.hidden, experts.shared_width, "the rows of the shared expert")
        yield replicated(f"{block}shared_expert_gate.weight", f"{to}gate_weight", 1, model.hidden)


FAMILY = Family("moe", ("qwen3_moe", "qwen2_moe", "mixtral"), megatron_layer)
