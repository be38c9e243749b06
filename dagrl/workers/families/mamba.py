"""Mamba-2 hybrids: NemotronH. Each layer is Mamba (M), attention (*), MLP (-) or experts (E), after one norm.

On each rank Megatron's `in_proj` is `[z, x, B, C, dt]` of its heads and groups, and `conv1d` is `[x, B, C]`
(`ssm/mamba_mixer.py`). vLLM has the same layout, except that a single group is replicated (`mamba_mixer2.py`). vLLM computes
with `A = -exp(A_log)` in float32. MLPs and experts have no gate.
"""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.errors import ConfigError
from dagrl.refit.slices import WeightSlice
from dagrl.workers.families.hf_config import ModelConfig
from dagrl.workers.families.megatron import Family, MegatronRank, ParameterNames, replicated, shard_range

Range = tuple[int, int]

LETTERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}


def layer_kind(model: ModelConfig, layer: int) -> str:
    """Returns M, *, - or E, from `layers_block_type` (transformers 5) or `hybrid_override_pattern`."""
    kinds = model.config.get("layers_block_type")
    if isinstance(kinds, list):
        letter = LETTERS.get(str(kinds[layer]))
        if letter is None:
            raise ConfigError(f"layers_block_type has {kinds[layer]!r}; the mamba family knows {', '.join(LETTERS)}")
        return letter
    pattern = model.text("hybrid_override_pattern")
    if len(pattern) != model.layers:
        raise ConfigError(
            f"the model's config.json has hybrid_override_pattern {pattern!r} for {model.layers} layers; expected one "
            "letter per layer, or layers_block_type"
        )
    return pattern[layer]


def megatron_layer(model: ModelConfig, rank: MegatronRank, layer: int, hf: str, local: str) -> Iterator[WeightSlice]:
    """Yields one norm and one mixer."""
    kind, mixer = layer_kind(model, layer), f"{hf}mixer."
    norm = {
        "M": ("norm", "mixer.in_proj"),
        "*": ("input_layernorm", "self_attention.linear_qkv"),
        "-": ("pre_mlp_layernorm", "mlp.linear_fc1"),
        "E": ("pre_mlp_layernorm", ""),
    }[kind]
    yield rank.norm(f"{hf}norm.weight", f"{local}{norm[0]}", norm[1] and f"{local}{norm[1]}", model.hidden)
    if kind == "M":
        yield from _megatron_mixer(model, rank, mixer, f"{local}mixer.")
    elif kind == "*":
        yield from rank.attention(model, mixer, f"{local}self_attention.")
    elif kind == "-":
        yield from _megatron_mlp(model, rank, mixer, f"{local}mlp.", model.ffn)
    else:
        yield from _megatron_experts(model, rank, mixer, f"{local}mlp.")


def _megatron_mixer(model: ModelConfig, rank: MegatronRank, hf: str, local: str) -> Iterator[WeightSlice]:
    heads, groups, state, kernel = map(model.size, ("mamba_num_heads", "n_groups", "ssm_state_size", "conv_kernel"))
    width, columns = heads * model.size("mamba_head_dim"), (0, model.hidden)
    inner = width, shard_range(width, rank.tp, f"{hf}in_proj.weight: the rows of the mamba heads")
    shard_range(groups, rank.tp, f"{hf}in_proj.weight: the mamba groups")
    group = groups * state, shard_range(groups * state, rank.tp, f"{hf}in_proj.weight: the rows of the mamba groups")
    low, high = shard_range(heads, rank.tp, f"{hf}A_log: the mamba heads")
    for rows, at in _stacked_rows(inner, inner, group, group, (heads, (low, high))):
        yield WeightSlice(f"{hf}in_proj.weight", (rows, columns), f"{local}in_proj.weight", (at, columns))
    taps = ((0, 1), (0, kernel))
    for rows, at in _stacked_rows(inner, group, group):
        yield WeightSlice(f"{hf}conv1d.weight", (rows, *taps), f"{local}conv1d.weight", (at, *taps))
        if model.flag("use_conv_bias", True):
            yield WeightSlice(f"{hf}conv1d.bias", (rows,), f"{local}conv1d.bias", (at,))
    for name, dtype in (("dt_bias", ""), ("A_log", "float32"), ("D", "float32")):
        yield WeightSlice(f"{hf}{name}", ((low, high),), f"{local}{name}", ((0, high - low),), dtype)
    start, stop = inner[1]
    yield WeightSlice(f"{hf}norm.weight", ((start, stop),), f"{local}norm.weight", ((0, stop - start),))
    what = "the columns of the mamba heads"
    yield rank.columns(f"{hf}out_proj.weight", f"{local}out_proj.weight", model.hidden, width, what)


def _stacked_rows(*parts: tuple[int, Range]) -> Iterator[tuple[Range, Range]]:
    """Yields row ranges in the parameter and in the local tensor, of stacked parts: each its size, and the rank's range."""
    start = at = 0
    for size, (low, high) in parts:
        yield (start + low, start + high), (at, at + high - low)
        start, at = start + size, at + high - low


def _megatron_mlp(model: ModelConfig, rank: MegatronRank, hf: str, local: str, width: int) -> Iterator[WeightSlice]:
    what = "the rows of the MLP"
    yield rank.rows(f"{hf}up_proj.weight", f"{local}linear_fc1.weight", width, model.hidden, what)
    yield rank.columns(f"{hf}down_proj.weight", f"{local}linear_fc2.weight", model.hidden, width, what)


def _megatron_experts(model: ModelConfig, rank: MegatronRank, hf: str, local: str) -> Iterator[WeightSlice]:
    count, width = model.size("n_routed_experts"), model.size("moe_intermediate_size")
    yield replicated(f"{hf}gate.weight", f"{local}router.weight", count, model.hidden)
    yield replicated(f"{hf}gate.e_score_correction_bias", f"{local}router.expert_bias", count, dtype="float32")
    names = (f"{hf}experts.*.up_proj.weight", f"{hf}experts.*.down_proj.weight")
    what = "the rows of moe_intermediate_size"
    latent = model.size("moe_latent_size", model.hidden)  # the input size of routed experts, smaller in Nemotron 3 Super
    yield from rank.experts(names, f"{local}experts.", count, latent, width, what)
    if model.has("moe_latent_size"):
        yield replicated(f"{hf}fc1_latent_proj.weight", f"{local}fc1_latent_proj.weight", latent, model.hidden)
        yield replicated(f"{hf}fc2_latent_proj.weight", f"{local}fc2_latent_proj.weight", model.hidden, latent)
    if shared := model.size("n_shared_experts", 0):
        shared *= model.size("moe_shared_expert_intermediate_size")
        yield from _megatron_mlp(model, rank, f"{hf}shared_experts.", f"{local}shared_experts.", shared)


MAMBA = Family(
    "mamba",
    ("nemotron_h",),
    megatron_layer,
    ParameterNames(
        embedding="backbone.embeddings.weight",
        layer="backbone.layers",
        norm="backbone.norm_f.weight",
        megatron_norm="final_norm",
    ),
)
