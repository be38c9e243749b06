"""Decoders that Megatron trains: which slices of a layer a rank holds.

Attention is grouped-query, as in Llama, Qwen2 (bias on query, key and value) and Qwen3 (per-head norms of queries and keys),
or latent (DeepSeek-V3). Then an MLP, or experts: Qwen3-MoE, Mixtral, and GLM-4.5 and DeepSeek-V3 (shared experts, a router
with sigmoid scores and an expert bias).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dagrl.config import Json
from dagrl.errors import ConfigError
from dagrl.refit.slices import WeightSlice
from dagrl.workers.families.hf_config import ModelConfig
from dagrl.workers.families.megatron import MegatronRank, replicated

LATENT_TYPES = ("deepseek_v3",)
EXPERT_TYPES = ("qwen3_moe", "mixtral", "glm4_moe", *LATENT_TYPES)
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", *EXPERT_TYPES)
"""What `model_type` of `config.json` may be."""


def check_model_type(hf_config: Mapping[str, Json]) -> None:
    """Raises ConfigError for a model without rules."""
    if hf_config.get("model_type") not in MODEL_TYPES:
        raise ConfigError(
            f"model_type is {hf_config.get('model_type')!r}; the Megatron worker supports {', '.join(MODEL_TYPES)}. Set "
            "policy.backend=fsdp for others"
        )


def decoder_layer(model: ModelConfig, rank: MegatronRank, layer: int, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields attention, then an MLP or experts, each with the norm before it. `hf` and `local` begin the names."""
    yield replicated(f"{hf}input_layernorm.weight", f"{local}input_layernorm.weight", model.hidden)
    attention = _latent_attention if model.type in LATENT_TYPES else MegatronRank.attention
    yield from attention(rank, model, f"{hf}self_attn.", f"{local}self_attention.")
    yield replicated(f"{hf}post_attention_layernorm.weight", f"{local}pre_mlp_layernorm.weight", model.hidden)
    if has_experts(model, layer):
        yield from _experts(model, rank, experts_of(model), hf, local)
    else:
        yield from rank.gated_mlp(f"{hf}mlp.", f"{local}mlp.", model.hidden, model.ffn, "the rows of intermediate_size")


@dataclass(frozen=True)
class Experts:
    """Sizes of a model's expert layers, and their names in its checkpoint.

    `bias`: the router chooses by sigmoid scores and a bias of each expert (`noaux_tc`, arXiv:2408.15664), and weights by the
    scores alone. `shared_width` is the size of the experts that process every token, together.
    """

    count: int
    width: int
    block: str = "mlp."  # name of the block
    shared_width: int = 0
    bias: bool = False
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


def experts_of(model: ModelConfig) -> Experts:
    """Reads the experts of a model.

    Transformers 5 writes `num_local_experts` for Qwen3-MoE; earlier versions and published checkpoints have `num_experts`.
    """
    if model.type == "mixtral":
        return Experts(model.size("num_local_experts", least=1), model.ffn, "block_sparse_moe.", parts=("w1", "w3", "w2"))
    width = model.size("moe_intermediate_size", least=1)
    if model.type == "qwen3_moe":
        return Experts(model.size("num_experts" if model.has("num_experts") else "num_local_experts", least=1), width)
    return Experts(
        model.size("n_routed_experts", least=1), width, shared_width=width * model.size("n_shared_experts", 0), bias=True
    )


def has_experts(model: ModelConfig, layer: int) -> bool:
    """Whether a layer has experts: in Qwen3-MoE every `decoder_sparse_step`-th except `mlp_only_layers`, in Mixtral all.

    In others from `first_k_dense_replace` on. As in transformers' decoder layers.
    """
    if model.type not in EXPERT_TYPES:
        return False
    if model.type in ("glm4_moe", *LATENT_TYPES):
        return layer >= model.size("first_k_dense_replace")
    without = model.config.get("mlp_only_layers") or []
    assert isinstance(without, list)
    return layer not in without and (layer + 1) % model.size("decoder_sparse_step", 1, least=1) == 0


def _experts(model: ModelConfig, rank: MegatronRank, experts: Experts, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields router, experts and shared experts."""
    block = f"{hf}{experts.block}"
    yield replicated(f"{block}gate.weight", f"{local}mlp.router.weight", experts.count, model.hidden)
    if experts.bias:
        name = f"{block}gate.e_score_correction_bias"
        yield replicated(name, f"{local}mlp.router.expert_bias", experts.count, dtype="float32")
    names = tuple(f"{block}experts.*.{part}.weight" for part in experts.parts)
    what = "the rows of an expert's intermediate size"
    yield from rank.experts(names, f"{local}mlp.experts.", experts.count, model.hidden, experts.width, what)
    if experts.shared_width:
        shared, to = f"{block}shared_experts.", f"{local}mlp.shared_experts."
        yield from rank.gated_mlp(shared, to, model.hidden, experts.shared_width, "the rows of the shared experts")


def _latent_attention(rank: MegatronRank, model: ModelConfig, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields multi-head latent attention. Megatron's local layers shard down-projections by rows, too."""
    compressed = model.size("q_lora_rank", 0)  # 0: queries are not compressed
    keys, nope, rope, values = map(model.size, ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries, what, down = model.heads * (nope + rope), "the query heads' rows", "the rows of a down-projection"
    if compressed:
        yield rank.rows(f"{hf}q_a_proj.weight", f"{local}linear_q_down_proj.weight", compressed, model.hidden, down)
        yield replicated(f"{hf}q_a_layernorm.weight", f"{local}q_layernorm.weight", compressed)
        yield rank.rows(f"{hf}q_b_proj.weight", f"{local}linear_q_up_proj.weight", queries, compressed, what)
    else:
        yield rank.rows(f"{hf}q_proj.weight", f"{local}linear_q_proj.weight", queries, model.hidden, what)
    name = f"{hf}kv_a_proj_with_mqa.weight"
    yield rank.rows(name, f"{local}linear_kv_down_proj.weight", keys + rope, model.hidden, down)
    yield replicated(f"{hf}kv_a_layernorm.weight", f"{local}kv_layernorm.weight", keys)
    up, rows = f"{local}linear_kv_up_proj.weight", model.heads * (nope + values)
    yield rank.rows(f"{hf}kv_b_proj.weight", up, rows, keys, "the key and value heads' rows")
    width = model.heads * values
    yield rank.columns(f"{hf}o_proj.weight", f"{local}linear_proj.weight", model.hidden, width, "the value heads' columns")
