"""Multi-head latent attention with routed and shared experts: DeepSeek-V3 and V2.

vLLM fuses both down-projections into `fused_qkv_a_proj`, which every rank holds whole, and computes `W_UK_T` and `W_UV` from
`kv_b_proj`. Megatron replicates the down-projections over the tensor-parallel ranks under Transformer Engine (`duplicated`),
and shards them by rows in its local layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.refit.slices import WeightSlice
from dagrl.workers.families.decoder import Experts, megatron_experts, megatron_mlp
from dagrl.workers.families.hf_config import ModelConfig
from dagrl.workers.families.megatron import Family, MegatronRank, replicated


def has_experts(model: ModelConfig, layer: int) -> bool:
    """Whether a layer has experts: every `moe_layer_freq`-th from `first_k_dense_replace` on."""
    return layer >= model.size("first_k_dense_replace", 0) and layer % model.size("moe_layer_freq", 1, least=1) == 0


def has_expert_bias(model: ModelConfig) -> bool:
    """Whether a bias corrects the router's scores (`noaux_tc`): in DeepSeek-V3, not in V2."""
    return model.text("topk_method", "noaux_tc" if model.type == "deepseek_v3" else "greedy") == "noaux_tc"


def experts_of(model: ModelConfig) -> Experts:
    """Reads the experts of a model."""
    width = model.size("moe_intermediate_size", least=1)
    shared = width * model.size("n_shared_experts") if model.has("n_shared_experts") else 0
    count = model.size("n_routed_experts", least=1)
    return Experts(count, width, "mlp.", "shared_experts.", shared, has_expert_bias(model))


def megatron_layer(model: ModelConfig, rank: MegatronRank, layer: int, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields latent attention, then an MLP or experts."""
    attention = f"{local}self_attention."
    yield replicated(f"{hf}input_layernorm.weight", f"{local}input_layernorm.weight", model.hidden)
    yield from _megatron_attention(model, rank, f"{hf}self_attn.", attention)
    if has_experts(model, layer):
        yield from megatron_experts(model, rank, experts_of(model), hf, local)
        return
    norm = f"{hf}post_attention_layernorm.weight"
    yield rank.norm(norm, f"{local}pre_mlp_layernorm", f"{local}mlp.linear_fc1", model.hidden)
    yield from megatron_mlp(model, rank, hf, local)


def _megatron_attention(model: ModelConfig, rank: MegatronRank, hf: str, local: str) -> Iterator[WeightSlice]:
    compressed = model.size("q_lora_rank", 0)  # 0: queries are not compressed
    keys, nope, rope, values = map(model.size, ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries, what = model.heads * (nope + rope), "the query heads' rows"
    if compressed:
        yield _down(rank, f"{hf}q_a_proj.weight", f"{local}linear_q_down_proj.weight", compressed, model.hidden)
        yield rank.norm(f"{hf}q_a_layernorm.weight", f"{local}q_layernorm", f"{local}linear_q_up_proj", compressed)
        yield rank.rows(f"{hf}q_b_proj.weight", f"{local}linear_q_up_proj.weight", queries, compressed, what)
    else:
        yield rank.rows(f"{hf}q_proj.weight", f"{local}linear_q_proj.weight", queries, model.hidden, what)
    down = f"{local}linear_kv_down_proj.weight"
    yield _down(rank, f"{hf}kv_a_proj_with_mqa.weight", down, keys + rope, model.hidden)
    yield rank.norm(f"{hf}kv_a_layernorm.weight", f"{local}kv_layernorm", f"{local}linear_kv_up_proj", keys)
    up, rows = f"{local}linear_kv_up_proj.weight", model.heads * (nope + values)
    yield rank.rows(f"{hf}kv_b_proj.weight", up, rows, keys, "the key and value heads' rows")
    width = model.heads * values
    yield rank.columns(f"{hf}o_proj.weight", f"{local}linear_proj.weight", model.hidden, width, "the value heads' columns")


def _down(rank: MegatronRank, name: str, tensor: str, rows: int, columns: int) -> WeightSlice:
    if rank.modules.transformer_engine:
        return replicated(name, tensor, rows, columns)
    return rank.rows(name, tensor, rows, columns, "the rows of a down-projection")


MLA = Family("mla", ("deepseek_v3", "deepseek_v2"), megatron_layer)
