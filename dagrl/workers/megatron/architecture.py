"""Reads a decoder's architecture from `config.json` and checks a parallel layout against it. Pure; needs no torch.

The driver calls `check_layout` before any worker starts. FLOPs are by Megatron's formula (`step_tflop`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dagrl.config import Json
from dagrl.errors import ConfigError, LayoutError
from dagrl.rl.routed_experts import RoutedLayers
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families import decoder
from dagrl.workers.families.hf_config import ModelConfig, constant_row

ROPE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}
"""Numbers that each `rope_type` needs in addition to `rope_theta`."""
OTHER_ROPE_PARAMETERS = (
    *("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
    *("short_factor", "long_factor", "factor"),
)
"""Those that `yarn` or `longrope` may have."""
PASSES = 3  # the backward pass has two products for each forward product
OPERATIONS = 2  # a multiplication and an addition
EXPERT_MULTIPLE = 8  # grouped products of experts (`experts.py`) need rows of a multiple of 16 bytes: 8 bfloat16 numbers


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention: ranks of the compressed queries (0: they are not) and of keys and values
    together; of a head, what is not rotated and what is, and its values."""

    query_rank: int
    rank: int
    plain: int
    rotated: int
    values: int


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder of one of `decoder.MODEL_TYPES`. `moe_layers[i]` says whether layer i has experts.

    With `expert_bias` the router chooses by sigmoid scores and a bias, among the experts of the best `groups_per_token` of
    `expert_groups`, and multiplies normalized scores by `expert_scale`. `shared_ffn` is the size of the experts that process
    every token, together. `rotary_dim` of a head's dimensions are rotated. A `scalar` model gives one number per token in
    place of logits. Inputs give no gradient to row `constant_row` of the embedding. In layer i a token sees `windows[i]`
    tokens, itself included, or all before it (None). In sequences of at most `full_tokens` rotations do not depend on the
    length. With `latent` attention, `head_dim` is that of queries and keys.
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    tied: bool
    norm_eps: float
    rope: Mapping[str, Json]  # `rope_theta`, `rope_type` and the parameters of a scaled rope
    max_positions: int
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    normalize_expert_weights: bool = True
    moe_layers: tuple[bool, ...] = ()
    shared_ffn: int = 0
    expert_bias: bool = False
    expert_scale: float = 1.0
    expert_groups: int = 1
    groups_per_token: int = 1
    qk_norm: bool = False  # queries and keys are normalized per head
    qkv_bias: bool = False
    rotary_dim: int = 0
    latent: Latent | None = None
    scalar: bool = False
    constant_row: int | None = None
    windows: tuple[int | None, ...] = ()
    full_tokens: int | None = None

    @property
    def computed(self) -> dict[str, Json]:
        """Everything that determines what is computed: no `max_positions`, `constant_row` and `full_tokens`.

        Equal for equal models, however their `config.json` files express them.
        """
        fields = {**asdict(self), "moe_layers": list(self.moe_layers), "windows": list(self.windows)}
        kind = str(self.rope["rope_type"])
        rope: dict[str, Json] = {key: _number(self.rope, key) for key in ("rope_theta", *ROPE_PARAMETERS[kind])}
        if kind in ("yarn", "longrope"):
            rope = {key: self.rope[key] for key in OTHER_ROPE_PARAMETERS if self.rope.get(key) is not None} | rope
        del fields["rope"], fields["max_positions"], fields["constant_row"], fields["full_tokens"]
        return {**fields, "rope_type": kind, **rope}

    @property
    def record(self) -> RoutedLayers | None:
        """The sizes of a record of each token's experts; None for a dense model."""
        return RoutedLayers(self.layers, self.experts, self.experts_per_token) if self.experts else None


def read_architecture(hf_config: Mapping[str, Json]) -> Architecture:
    """Returns the architecture of a `config.json`. Raises ConfigError naming what is missing or not supported."""
    _check_supported(hf_config)
    config = ModelConfig(hf_config)
    rope = _rope(config.config)
    latent = _latent(config) if config.type in decoder.LATENT_TYPES else None
    head_dim = latent.plain + latent.rotated if latent else config.head_dim
    dense = Architecture(
        model_type=config.type,
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.heads if latent else config.kv_heads,
        head_dim=head_dim,
        ffn=config.ffn,
        vocabulary=config.vocabulary,
        tied=config.tied,
        norm_eps=_number(config.config, "rms_norm_eps", 1e-5 if config.type == "mixtral" else 1e-6),
        rope=rope,
        max_positions=config.size("max_position_embeddings", 32768, least=1),
        qk_norm=config.qk_norm,
        qkv_bias=config.qkv_bias,
        rotary_dim=latent.rotated if latent else int(head_dim * _number(rope, "partial_rotary_factor", 1.0)),
        latent=latent,
        scalar=config.scalar,
        constant_row=constant_row(hf_config),
        windows=_windows(config),
        full_tokens=_full_tokens(config, rope),
    )
    model = _with_experts(dense, config) if dense.model_type in decoder.EXPERT_TYPES else dense
    if model.experts_per_token == 1 and model.normalize_expert_weights:
        raise ConfigError(
            "num_experts_per_tok is 1 and expert weights are normalized, so every weight is 1 and the router cannot learn. "
            "Megatron rejects this; set norm_topk_prob to false (qwen3_moe), or choose another model"
        )
    return model


def check_layout(hf_config: Mapping[str, Json], layout: ParallelLayout) -> None:
    """Raises LayoutError, listing everything to change, if `layout` does not fit the model."""
    problems = [f"- {text}" for text in _problems(read_architecture(hf_config), layout)]
    if problems:
        raise LayoutError(f"layout {layout.describe()} does not fit the model:\n" + "\n".join(problems))


def _problems(model: Architecture, layout: ParallelLayout) -> Iterator[str]:
    tp, etp = layout.tp, layout.expert_tp
    if model.heads % tp:
        yield f"{model.heads} attention heads are not divisible by tp {tp}; choose tp among their divisors"
    if model.kv_heads % tp and tp % model.kv_heads:
        yield f"{model.kv_heads} key-value heads and tp {tp}: one must divide the other; choose another tp"
    sizes = {"intermediate_size": model.ffn, "the shared experts' size": model.shared_ffn, "hidden_size": model.hidden}
    if model.latent is not None:
        sizes |= {"q_lora_rank": model.latent.query_rank}
        sizes |= {"kv_lora_rank + qk_rope_head_dim": model.latent.rank + model.latent.rotated}
    for what, size in sizes.items():
        if size % tp:
            yield f"{what} {size} is not divisible by tp {tp}; choose another tp"
    if layout.pp == 2 and layout.vpp > 1 and None not in (layout.first_stage_layers, layout.last_stage_layers):
        yield "with pp 2 and vpp Megatron accepts the layer count of one stage only; choose the first or the last stage"
    else:
        try:
            layout.stage_layers(model.layers, 0)
        except LayoutError as error:
            yield str(error)
    if not model.experts:
        if layout.ep != 1 or layout.etp not in (None, 1, tp):
            yield f"the model has no experts, but ep is {layout.ep} and etp {etp}; set ep to 1 and leave etp out"
        return
    if model.experts % layout.ep:
        yield f"{model.experts} experts are not divisible by ep {layout.ep}; choose another ep"
    if model.expert_ffn % (etp * EXPERT_MULTIPLE):
        multiple = f"{EXPERT_MULTIPLE} times etp {etp}"
        yield f"moe_intermediate_size {model.expert_ffn} is not divisible by {multiple}; choose another etp"
    if model.hidden % EXPERT_MULTIPLE:
        what = f"hidden_size {model.hidden} of a model with experts"
        yield f"{what} is not divisible by {EXPERT_MULTIPLE}; choose another model"


def _check_supported(hf_config: Mapping[str, Json]) -> None:
    decoder.check_model_type(hf_config)
    kind = hf_config["model_type"]
    if hf_config.get("attention_bias") and kind != "glm4_moe":  # which has none at the output
        raise ConfigError("attention_bias is true; the Megatron worker supports attention without an output bias only")
    if hf_config.get("mlp_bias"):
        raise ConfigError("mlp_bias is true; the Megatron worker supports linear layers without bias only")
    if hf_config.get("logit_scale") not in (None, 1):
        raise ConfigError(f"logit_scale is {hf_config['logit_scale']!r}; the Megatron worker does not scale logits")
    if hf_config.get("is_causal") is False:
        raise ConfigError("is_causal is false; the Megatron worker supports causal attention only")
    if hf_config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act is {hf_config['hidden_act']!r}; the Megatron worker supports silu only")
    if kind in ("glm4_moe", "deepseek_v3") and hf_config.get("norm_topk_prob", True) is not True:
        raise ConfigError("norm_topk_prob is false; Megatron's router with sigmoid scores always normalizes them")
    if hf_config.get("rope_interleave") is False:
        raise ConfigError("rope_interleave is false; the Megatron worker, as vLLM, rotates pairs of neighbouring dimensions")
    if kind == "deepseek_v3" and hf_config.get("topk_method") != "noaux_tc":
        raise ConfigError("config.json of a deepseek_v3 model has no topk_method noaux_tc, which vLLM reads; add it")
    if kind == "glm4_moe" and hf_config.get("head_dim") is None:
        raise ConfigError("config.json of a glm4_moe model has no head_dim, which vLLM reads; add it")


def _windows(model: ModelConfig) -> tuple[int | None, ...]:
    """Returns the window of each layer, as in transformers. Qwen configurations have `sliding_window` without using it."""
    if not model.has("sliding_window") or not (model.type in ("mistral", "mixtral") or model.flag("use_sliding_window")):
        return (None,) * model.layers
    window = model.size("sliding_window", least=1)
    if model.type not in ("qwen2", "qwen3"):
        return (window,) * model.layers
    kinds, first = model.config.get("layer_types"), model.size("max_window_layers", 28)
    windowed = [kind == "sliding_attention" for kind in kinds] if isinstance(kinds, list) else []
    windowed = windowed or [layer >= first for layer in range(model.layers)]
    return tuple(window if there else None for there in windowed)


def _full_tokens(model: ModelConfig, rope: Mapping[str, Json]) -> int | None:
    """Returns the smallest of what `Architecture.full_tokens` must not exceed."""
    # vLLM gives a Llama windows, and transformers does not.
    windowed = model.type == "llama" and model.has("sliding_window")
    limits = [model.size("sliding_window", least=1)] if windowed else []
    if rope["rope_type"] == "dynamic":
        limits.append(model.size("max_position_embeddings", least=1))
    if rope["rope_type"] == "longrope":
        limits.append(int(_number(rope, "original_max_position_embeddings")))
    return min(limits, default=None)


def _latent(model: ModelConfig) -> Latent:
    nope, rope = model.size("qk_nope_head_dim", least=1), model.size("qk_rope_head_dim", least=1)
    ranks = model.size("q_lora_rank", 0), model.size("kv_lora_rank", least=1)
    return Latent(*ranks, nope, rope, model.size("v_head_dim", least=1))


def _rope(hf_config: Mapping[str, Json]) -> dict[str, Json]:
    """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (earlier; `rope_type` was `type`)."""
    usual = 1e6 if hf_config["model_type"] == "mixtral" else 1e4
    rope: dict[str, Json] = {"rope_theta": _number(hf_config, "rope_theta", usual)}
    for key in ("rope_scaling", "rope_parameters"):
        value = hf_config.get(key)
        rope |= value if isinstance(value, dict) else {}
    kind = str(rope.setdefault("rope_type", rope.get("type", "default")))
    if kind not in ROPE_PARAMETERS:
        raise ConfigError(f"rope_type is {kind!r}; the Megatron worker supports {', '.join(ROPE_PARAMETERS)}")
    if kind in ("yarn", "longrope"):
        original = hf_config.get("original_max_position_embeddings") or hf_config.get("max_position_embeddings")
        rope.setdefault("original_max_position_embeddings", original)
    for name in ("rope_theta", *ROPE_PARAMETERS[kind]):
        _number(rope, name)
    share = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0))
    if hf_config["model_type"] == "glm4_moe":
        if kind in ("yarn", "longrope"):  # they scale what is rotated alone
            raise ConfigError(
                f"rope_type is {kind!r}; the Megatron worker has it for models whose whole heads are rotated only"
            )
        return rope | {"partial_rotary_factor": share}
    if share != 1.0:
        raise ConfigError("partial_rotary_factor is not 1; the Megatron worker rotates whole heads of this model type only")
    return rope


def _with_experts(dense: Architecture, model: ModelConfig) -> Architecture:
    """Adds the experts to a dense decoder, as the family's weight layout has them."""
    experts = decoder.experts_of(model)
    groups, chosen, per_token = (model.size(key, 1, least=1) for key in ("n_group", "topk_group", "num_experts_per_tok"))
    if groups > 1 and (not experts.bias or per_token != 2 * chosen or experts.count % groups):
        raise ConfigError(
            f"n_group is {groups}, topk_group {chosen}, num_experts_per_tok {per_token}: transformers chooses groups by two "
            "of their experts and Megatron by as many as a group gives, so a token must have two experts for each of its "
            "groups. Set policy.backend=fsdp"
        )
    return replace(
        dense,
        experts=experts.count,
        experts_per_token=model.size("num_experts_per_tok", least=1),
        expert_ffn=experts.width,
        normalize_expert_weights=model.type == "mixtral" or model.flag("norm_topk_prob"),
        shared_ffn=experts.shared_width,
        expert_bias=experts.bias,
        expert_scale=_number(model.config, "routed_scaling_factor", 1.0) if experts.bias else 1.0,
        expert_groups=groups,
        groups_per_token=chosen if groups > 1 else 1,
        moe_layers=tuple(decoder.has_experts(model, layer) for layer in range(dense.layers)),
    )


def _number(hf_config: Mapping[str, Json], key: str, default: float | None = None) -> float:
    value = hf_config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"the model's config.json has {key} = {value!r}; expected a number")
    return float(value)


def token_flops(model: Architecture) -> float:
    """Returns the forward FLOPs of a token, without attention to earlier tokens."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = model.hidden * (queries + 2 * keys) + queries * model.hidden
    if (latent := model.latent) is not None:
        attention = model.hidden * (latent.rank + latent.rotated) + model.heads * latent.values * model.hidden
        attention += model.heads * (latent.plain + latent.values) * latent.rank
        attention += latent.query_rank * (model.hidden + queries) if latent.query_rank else model.hidden * queries
    experts = sum(model.moe_layers) if model.experts else 0
    dense = 3 * model.hidden * model.ffn  # gate, up and down
    routed = 3 * model.hidden * (model.expert_ffn * model.experts_per_token + model.shared_ffn)
    layers = model.layers * attention + (model.layers - experts) * dense + experts * routed
    return OPERATIONS * float(layers + model.hidden * (1 if model.scalar else model.vocabulary))


def sequence_flops(model: Architecture, length: npt.ArrayLike) -> Any:
    """Returns the forward FLOPs of a sequence, or of each in an array of lengths: its tokens, and causal attention: half of
    the square, or a band.
    """
    count, head = np.asarray(length), model.head_dim + (model.latent.values if model.latent else model.head_dim)
    seen = (count if window is None else np.minimum(window, count) for window in model.windows)
    pairs = sum(count * tokens - tokens * tokens / 2 for tokens in seen)
    return count * token_flops(model) + OPERATIONS * model.heads * head * pairs


def step_tflop(model: Architecture, lengths: Iterable[int]) -> float:
    """Returns the TFLOPs of a training step on sequences of these lengths.

    As `num_floating_point_operations` of Megatron-LM (megatron/training/training.py): three times the forward matrix
    products of projections, MLPs (those of a token's experts), causal attention and the output layer. Norms and
    recomputation do not count. Attention uses each sequence's own length, so padding and packing change nothing.
    """
    return PASSES * float(sequence_flops(model, [*lengths]).sum()) / 1e12
