"""A model's `config.json`: typed access, transformers' defaults, and the keys that decide what is computed."""

from collections.abc import Mapping
from typing import cast

from dagrl.config import Json
from dagrl.errors import ConfigError

CHECKPOINT_KEYS = frozenset(
    (
        *("_name_or_path", "architectures", "auto_map", "dtype", "quantization_config", "torch_dtype"),
        *("transformers_version", "use_cache"),
    )
)
"""Keys that describe the checkpoint, not the model. Train and generation workers may differ in them."""

SCALAR_HEAD = "scalar_head"
"""A key of dagrl: the model ends in one number per token, the value of a critic or the score of a reward model, in place of
logits. The parameter is `SCORE`, as in transformers' `ForSequenceClassification` with one label."""

SCORE = "score.weight"

DRAFT_LAYERS = "num_nextn_predict_layers"
"""The key for the number of layers for multi-token prediction, which are not trained."""

MODEL_DEFAULTS: Mapping[str, Mapping[str, Json]] = {
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "glm4_moe": {
        "num_key_value_heads": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
    },
    "deepseek_v3": {
        "q_lora_rank": 1536,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}
"""Defaults of transformers' configuration classes for models of Megatron, where they differ from ours. vLLM uses the same.

They apply to a missing key, not to one that is null.
"""


def with_scalar_head(hf_config: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the configuration of the same model with a scalar head."""
    return {**hf_config, SCALAR_HEAD: True}


def as_classifier(hf_config: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the `config.json` of the same decoder as transformers' `ForSequenceClassification` with one label."""
    names = hf_config.get("architectures")
    kinds: list[Json] = [
        str(name).replace("ForCausalLM", "ForSequenceClassification") for name in cast(list[Json], names or [])
    ]
    return {**hf_config, "architectures": kinds, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def constant_row(hf_config: Mapping[str, Json]) -> int | None:
    """Returns the token whose row of the input embedding is a constant, as `padding_idx` makes it in transformers.

    That is `pad_token_id`, which stands for no text: its row has no gradient from inputs, only that of a tied output layer.
    A row of zeros, as transformers initializes it, would have one of 1 / sqrt(eps) through the RMSNorm that follows. None
    if the token also ends text (`eos_token_id`): between the turns of a conversation it is text.
    """
    padding, ends = hf_config.get("pad_token_id"), hf_config.get("eos_token_id")
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        return None
    return None if padding in (ends if isinstance(ends, list) else [ends]) else padding


def model_keys(hf_config: Mapping[str, Json]) -> dict[str, Json]:
    """Returns all keys that affect the computation, also those that no shape shows, such as the rotary base.

    Null keys are left out.
    """
    return {key: value for key, value in hf_config.items() if value is not None and key not in CHECKPOINT_KEYS}


class ModelConfig:
    """Typed access to a `config.json`. A missing key without a default raises a ConfigError that names it.

    `config` is completed with `MODEL_DEFAULTS` of the `model_type`.
    """

    def __init__(self, hf_config: Mapping[str, Json]) -> None:
        self.config = {**MODEL_DEFAULTS.get(str(hf_config.get("model_type")), {}), **hf_config}

    def size(self, key: str, default: int | None = None, least: int = 0) -> int:
        """Returns a whole number of at least `least`."""
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"the model's config.json has {key} = {value!r}; expected a whole number")
        if value < least:
            raise ConfigError(f"the model's config.json has {key} = {value}; expected a number of at least {least}")
        return value

    def flag(self, key: str) -> bool:
        """Returns a boolean."""
        return bool(self.config.get(key))

    def text(self, key: str) -> str:
        """Returns a string."""
        return str(self.config.get(key) or "")

    def has(self, key: str) -> bool:
        """Whether the key is present and not null."""
        return self.config.get(key) is not None

    @property
    def type(self) -> str:
        return self.text("model_type")

    @property
    def layers(self) -> int:
        """Number of layers. Hybrid models may list the kind of each layer instead."""
        kinds = self.config.get("layers_block_type")
        return len(kinds) if isinstance(kinds, list) else self.size("num_hidden_layers", least=1)

    @property
    def draft_layers(self) -> int:
        """Number of layers that follow the model's own in its checkpoint, for multi-token prediction."""
        return self.size(DRAFT_LAYERS, 0)

    @property
    def hidden(self) -> int:
        return self.size("hidden_size", least=1)

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads", least=1)

    @property
    def kv_heads(self) -> int:
        count = self.size("num_key_value_heads", self.heads, least=1)
        if self.heads % count:
            raise ConfigError(
                f"the model's config.json has num_attention_heads = {self.heads}, not a multiple of num_key_value_heads = "
                f"{count}; correct that file. A missing num_key_value_heads has transformers' default"
            )
        return count

    @property
    def head_dim(self) -> int:
        return self.size("head_dim", self.hidden // self.heads, least=1)

    @property
    def ffn(self) -> int:
        return self.size("intermediate_size", least=1)

    @property
    def vocabulary(self) -> int:
        return self.size("vocab_size", least=1)

    @property
    def scalar(self) -> bool:
        """Whether the model has a scalar head in place of the vocabulary's."""
        return self.flag(SCALAR_HEAD)

    @property
    def tied(self) -> bool:
        return self.flag("tie_word_embeddings") and not self.scalar

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalized per head."""
        return self.type.startswith("qwen3") or self.flag("use_qk_norm")

    @property
    def qkv_bias(self) -> bool:
        """Whether query, key and value projections have a bias."""
        return self.type.startswith("qwen2") or self.flag("attention_bias")
