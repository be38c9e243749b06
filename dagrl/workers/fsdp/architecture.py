"""Which of transformers' classes a model has. Imports transformers late."""

from collections.abc import Mapping
from typing import Any

from dagrl.config import Json, PolicyConfig
from dagrl.errors import ConfigError, error_line
from dagrl.run.model import auto_class
from dagrl.workers.families.hf_config import SCALAR_HEAD


def find_config(policy: PolicyConfig, hf_config: Mapping[str, Json], *, scalar: bool) -> Any:
    """Returns transformers' configuration of a model with this `config.json`; if `scalar`, with one label."""
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    kind = hf_config.get("model_type")
    if kind in list(CONFIG_MAPPING):
        labels = {"num_labels": 1} if scalar else {}
        content = PreTrainedConfig._decode_special_floats({**hf_config, **labels})  # infinity has a form of its own
        return CONFIG_MAPPING[kind].from_dict({key: value for key, value in content.items() if key != SCALAR_HEAD})
    if has_own_code(hf_config) and policy.model_name is not None and policy.fsdp_cfg.trust_remote_code:
        try:
            return AutoConfig.from_pretrained(policy.model_name, trust_remote_code=True)
        except OSError as error:
            reason = error_line(error)
            raise ConfigError(
                f"cannot read the code of {policy.model_name}: {reason} Copy its Python files there"
            ) from error
    if has_own_code(hf_config):
        raise ConfigError(
            f"model_type {kind!r} has its code in its directory; if you trust it, set policy.fsdp_cfg.trust_remote_code=true"
        )
    raise ConfigError(f"transformers does not know model_type {kind!r}; a newer version may, or use another model")


def has_own_code(hf_config: Mapping[str, Json]) -> bool:
    """Whether transformers does not have a model with this `config.json`, and its directory has the code."""
    from transformers import CONFIG_MAPPING

    return "auto_map" in hf_config and hf_config.get("model_type") not in list(CONFIG_MAPPING)


def layer_configs(config: Any) -> list[Any]:
    """Returns the configuration of each layer of a model's text part that has its own; else that of the text part alone."""
    text = config.get_text_config()
    return [*text.per_layer_config] if text.is_heterogeneous else [text]


def find_class(policy: PolicyConfig, config: Any, *, scalar: bool) -> type[Any]:
    """Returns the class with a language model's head, or, if `scalar`, with one number per token."""
    from transformers import AutoModelForSequenceClassification
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    auto = AutoModelForSequenceClassification if scalar else auto_class(config)
    kind: type[Any] | None = auto._model_mapping.get(type(config), None)
    own = getattr(config, "auto_map", None) or {}
    if kind is None and auto.__name__ in own and policy.fsdp_cfg.trust_remote_code:
        kind = get_class_from_dynamic_module(own[auto.__name__], policy.model_name)
    if kind is None:
        what = "a scalar head (ForSequenceClassification)" if scalar else "a causal language model's head"
        raise ConfigError(f"transformers has no class of {config.model_type!r} with {what}; choose another model")
    return kind


def vision_tower(model: Any) -> Any:
    """Returns the module of a model that encodes images; None if there is none."""
    tower = model.get_encoder(modality="image")
    return None if tower in (model, model.base_model) else tower
