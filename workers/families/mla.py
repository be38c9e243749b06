"""Multi-head latent attention with routed and shared experts: DeepSeek-V3 and V2.

vLLM fuses both down-projections into `fused_qkv_a_proj`, which every rank holds whole, and computes `W_UK_T` and `W_UV` from
`kv_b_proj`. Megatron replicates the down-projections over the tensor-parallel ranks under Transformer Engine (`duplicated`),
and shards them by rows in its local layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dagrl.refit.slices import WeightSlice
from dagrl.workers.families import dense
from dagrl.workers.families.family import DerivedRule, Family
from dagrl.workers.families.hf_config import ModelConfig
from dagrl.workers.families.megatron import MegatronRank, replicated
from dagrl.workers.families.vllm import VllmRank
from dagrl.workers.families.vllm import replicated as vllm_replicated


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention. `query` is 0 if queries are not compressed."""

    query: int
    key_value: int
    nope: int
    rope: int
    value: int

    @property
    def head(self) -> int:
        """Rows of a query head."""
        return self.nope + self.rope


def latent_of(model: ModelConfig) -> Latent:
    """Reads the sizes from `config.json`."""
    query = model.size("q_lora_rank") if model.has("q_lora_rank") else 0
    sizes = (model.size(key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return Latent(query, *sizes)


def has_experts(model: ModelConfig, layer: int) -> bool:
    """Whether a layer has experts: every `moe_layer_freq`-th from `first_k_dense_replace` on."""
    return layer >= model.size("first_k_dense_replace", 0) and layer % model.size("moe_layer_freq", 1, least=1) == 0


def has_expert_bias(model: ModelConfig) -> bool:
    """Whether a bias corrects the router's scores (`noaux_tc`): in DeepSeek-V3, not in V2."""
    return model.text("topk_method", "noaux_tc" if model.type == "deepseek_v3" else "greedy") == "noaux_tc"


def megatron_layer(model: ModelConfig, rank: MegatronRank, layer: int, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields latent attention, then an MLP or experts."""
    attention = f"{local}self_attention."
    yield replicated(f"{hf}input_layernorm.weight", f"{local}input_layernorm.weight", model.hidden)
    yield from _megatron_attention(model, rank, f"{hf}self_attn.", attention)
    if has_experts(model, layer):
        yield dense.megatron_moe_norm(model, hf, local)
        yield from _megatron_experts(model, rank, f"{hf}mlp.", f"{local}mlp.")
        return
    norm = f"{hf}post_attention_layernorm.weight"
    yield rank.norm(norm, f"{local}pre_mlp_layernorm", f"{local}mlp.linear_fc1", model.hidden)
    yield from dense.megatron_mlp(model, rank, hf, local)


def _megatron_attention(model: ModelConfig, rank: MegatronRank, hf: str, local: str) -> Iterator[WeightSlice]:
    latent = latent_of(model)
    queries, what = model.heads * latent.head, "the query heads' rows"
    if latent.query:
        down = (f"{hf}q_a_proj.weight", f"{local}linear_q_down_proj.weight", latent.query)
        yield _down(rank, *down, model.hidden)
        yield rank.norm(f"{hf}q_a_layernorm.weight", f"{local}q_layernorm", f"{local}linear_q_up_proj", latent.query)
        yield rank.rows(f"{hf}q_b_proj.weight", f"{local}linear_q_up_proj.weight", queries, latent.query, what)
    else:
        yield rank.rows(f"{hf}q_proj.weight", f"{local}linear_q_proj.weight", queries, model.hidden, what)
    down = (f"{hf}kv_a_proj_with_mqa.weight", f"{local}linear_kv_down_proj.weight", latent.key_value + latent.rope)
    yield _down(rank, *down, model.hidden)
    yield rank.norm(f"{hf}kv_a_layernorm.weight", f"{local}kv_layernorm", f"{local}linear_kv_up_proj", latent.key_value)
    rows = model.heads * (latent.nope + latent.value)
    up = f"{local}linear_kv_up_proj.weight"
    yield rank.rows(f"{hf}kv_b_proj.weight", up, rows, latent.key_value, "the key and value heads' rows")
    width = model.heads * latent.value
    yield rank.columns(f"{hf}o_proj.weight", f"{local}linear_proj.weight", model.hidden, width, "the value heads' columns")


def _down(rank: MegatronRank, name: str, tensor: str, rows: int, columns: int) -> WeightSlice:
    if rank.modules.transformer_engine:
        return replicated(name, tensor, rows, columns)
    return rank.rows(name, tensor, rows, columns, "the rows of a down-projection")


def _megatron_experts(model: ModelConfig, rank: MegatronRank, hf: str, local: str) -> Iterator[WeightSlice]:
    count, width = model.size("n_routed_experts"), model.size("moe_intermediate_size")
    yield replicated(f"{hf}gate.weight", f"{local}router.weight", count, model.hidden)
    if has_expert_bias(model):
        yield replicated(f"{hf}gate.e_score_correction_bias", f"{local}router.expert_bias", count, dtype="float32")
    names = tuple(f"{hf}experts.*.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj"))
    what = "the rows of moe_intermediate_size"
    yield from rank.experts(names, f"{local}experts.", count, model.hidden, width, what)
    if model.has("n_shared_experts"):
        shared = f"{hf}shared_experts."
        parts = (f"{shared}gate_proj.weight", f"{shared}up_proj.weight", f"{shared}down_proj.weight")
        size = width * model.size("n_shared_experts")
        yield from rank.gated_mlp(parts, f"{local}shared_experts.", model.hidden, size, "the rows of the shared experts")


def vllm_layer(model: ModelConfig, rank: VllmRank, layer: int, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields latent attention, then an MLP or experts, and both norms."""
    yield from _vllm_attention(model, rank, f"{hf}self_attn.", f"{local}self_attn.")
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield vllm_replicated(f"{hf}{norm}.weight", model.hidden, tensor=f"{local}{norm}.weight")
    if has_experts(model, layer):
        yield from _vllm_experts(model, rank, f"{hf}mlp.", f"{local}mlp.")
    else:
        yield from dense.vllm_mlp(model, rank, hf, local)


def _vllm_attention(model: ModelConfig, rank: VllmRank, hf: str, local: str) -> Iterator[WeightSlice]:
    latent = latent_of(model)
    key_value = latent.key_value + latent.rope
    queries = rank.part(model.heads, "the attention heads")
    rows = (queries[0] * latent.head, queries[1] * latent.head)
    if latent.query:
        fused = f"{local}fused_qkv_a_proj"
        yield from rank.stacked(f"{hf}q_a_proj", fused, (0, latent.query), 0, model.hidden)
        yield from rank.stacked(f"{hf}kv_a_proj_with_mqa", fused, (0, key_value), latent.query, model.hidden)
        yield vllm_replicated(f"{hf}q_a_layernorm.weight", latent.query, tensor=f"{local}q_a_layernorm.weight")
        yield from rank.stacked(f"{hf}q_b_proj", f"{local}q_b_proj", rows, 0, latent.query)
    else:
        yield from rank.stacked(f"{hf}q_proj", f"{local}q_proj", rows, 0, model.hidden)
        yield from rank.stacked(f"{hf}kv_a_proj_with_mqa", f"{local}kv_a_proj_with_mqa", (0, key_value), 0, model.hidden)
    yield vllm_replicated(f"{hf}kv_a_layernorm.weight", latent.key_value, tensor=f"{local}kv_a_layernorm.weight")
    each = latent.nope + latent.value
    up = (queries[0] * each, queries[1] * each)
    yield from rank.stacked(f"{hf}kv_b_proj", f"{local}kv_b_proj", up, 0, latent.key_value)
    columns = (queries[0] * latent.value, queries[1] * latent.value)
    yield from rank.row_parallel(f"{hf}o_proj", f"{local}o_proj", model.hidden, columns)


def _vllm_experts(model: ModelConfig, rank: VllmRank, hf: str, local: str) -> Iterator[WeightSlice]:
    count, width = model.size("n_routed_experts"), model.size("moe_intermediate_size")
    yield vllm_replicated(f"{hf}gate.weight", count, model.hidden, tensor=f"{local}gate.weight")
    if has_expert_bias(model):
        bias = "gate.e_score_correction_bias"
        yield vllm_replicated(f"{hf}{bias}", count, tensor=f"{local}{bias}", dtype="float32")
    names = tuple(f"{hf}experts.*.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj"))
    yield from rank.experts(names, f"{local}experts.", count, model.hidden, width)
    if model.has("n_shared_experts"):
        size = width * model.size("n_shared_experts")
        shared = "shared_experts."
        yield from rank.gated_mlp(f"{hf}{shared}", f"{local}{shared}", model.hidden, size, what="the shared experts' size")


def derived(model: ModelConfig, layer: int, local: str) -> Iterator[DerivedRule]:
    """Yields the rule for the absorbed projections used in decoding."""
    yield DerivedRule("absorbed_kv", f"{local}self_attn.mla_attn.mla_attn", ("W_UV", "W_UK_T"))


FAMILY = Family("mla", ("deepseek_v3", "deepseek_v2"), megatron_layer, vllm_layer, derived=derived)
