"""What of a `config.json` says which model it is, alike for train and generation workers, and what it need not say."""

from __future__ import annotations

from collections.abc import Mapping

from dagrl.config import Json
from dagrl.errors import ConfigError

OF_THE_FILE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "quantization_config",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Who wrote a checkpoint, with what, and in which form: both sides may differ in it and still compute the same model."""

WHEN_ABSENT: Mapping[str, Mapping[str, Json]] = {
    "qwen2": {"num_key_value_heads": 32},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4},
    "mixtral": {"num_key_value_heads": 8},
    "deepseek_v2": {"q_lora_rank": 1536, "n_shared_experts": 2},
    "deepseek_v3": {"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3},
    "nemotron_h": {"num_key_value_heads": 8, "head_dim": 128, "n_shared_experts": 1},
}
"""What transformers, and vLLM through it, takes for a key that is not there: the defaults of its configuration classes that
differ from ours, by `model_type`. A key that is null has none of these."""


def with_defaults(hf_config: Mapping[str, Json]) -> dict[str, Json]:
    """A `config.json` with what `WHEN_ABSENT` says of its `model_type`."""
    return {**WHEN_ABSENT.get(str(hf_config.get("model_type")), {}), **hf_config}


def check_query_groups(heads: int, kv_heads: int) -> None:
    """Raise ConfigError for heads that are not as many for each key-value head."""
    if heads % kv_heads:
        raise ConfigError(
            f"the model's config.json has num_attention_heads = {heads}, which is no multiple of num_key_value_heads = "
            f"{kv_heads}; correct that file. Where it does not say num_key_value_heads, transformers' default is taken"
        )


def model_keys(hf_config: Mapping[str, Json]) -> dict[str, Json]:
    """All keys that decide what is computed, not only where weights lie: a rotary base differs without a trace in shapes.

    A key that is null is one that is not there.
    """
    return {key: value for key, value in hf_config.items() if value is not None and key not in OF_THE_FILE}
