"""Generation in blockwise FP8: vLLM's arguments, and the parameters to quantize while it loads a plain checkpoint.

The format is DeepSeek-V3's (`quantization_config` with `weight_block_size` [128, 128] and dynamic activations). Every linear
layer except the routers is quantized; embedding, head and norms are not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dagrl.config import Config, Json
from dagrl.config.settings import generation_dtype
from dagrl.errors import ConfigError
from dagrl.refit.fp8 import BLOCK, SCALE_SUFFIX, quantize_blocks
from dagrl.workers.families.hf_config import ModelConfig
from dagrl.workers.vllm.environment import require_generation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ROUTERS = ("mlp.gate", "mlp.router", "mlp.shared_expert_gate", "block_sparse_moe.gate", "mixer.gate")
"""Names of routers in a layer."""

_FORM: dict[str, Json] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def in_fp8(config: Config, hf_config: Mapping[str, Json]) -> bool:
    """Returns whether the engine holds its linear layers in blockwise FP8, by configuration or as the checkpoint does.

    Raises ConfigError for a checkpoint in another quantized format.
    """
    form = hf_config.get("quantization_config")
    if form is None:
        return require_generation(config).vllm_cfg.precision == "fp8"
    keys = {key: form.get(key) for key in _FORM} if isinstance(form, dict) else form
    if keys != _FORM:
        raise ConfigError(
            f"the checkpoint's quantization_config has {keys}; a refit writes models without one, or with {_FORM} "
            "(DeepSeek-V3's form). Give policy.model_name a checkpoint in bfloat16 and set "
            "policy.generation.vllm_cfg.precision=fp8"
        )
    return True


def compute_dtype(config: Config, hf_config: Mapping[str, Json]) -> str:
    """Returns the engine's compute dtype by vLLM's name."""
    return "bfloat16" if in_fp8(config, hf_config) else generation_dtype(config)


def quantization_arguments(config: Config, hf_config: Mapping[str, Json]) -> dict[str, Any]:
    """Returns vLLM's engine arguments for dtypes. For an FP8 engine a plain checkpoint is quantized while loading."""
    arguments: dict[str, Any] = {"dtype": compute_dtype(config, hf_config)}
    if quantizes(config, hf_config):
        arguments["hf_overrides"] = {"quantization_config": block_fp8(ModelConfig(hf_config).layers)}
    return arguments


def block_fp8(layers: int) -> dict[str, Json]:
    """Returns the `quantization_config` of a blockwise FP8 checkpoint. Routers, linear layers to vLLM, are not quantized."""
    return {
        **_FORM,
        "modules_to_not_convert": [
            f"{prefix}.layers.{layer}.{router}"
            for layer in range(layers)
            for prefix in ("backbone", "model")
            for router in ROUTERS
        ],
    }


def quantizes(config: Config, hf_config: Mapping[str, Json]) -> bool:
    """Returns whether a plain checkpoint must be quantized while loading."""
    return in_fp8(config, hf_config) and hf_config.get("quantization_config") is None


def quantize_checkpoint(
    weights: Iterator[tuple[str, Tensor]], names: Collection[str], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yields a checkpoint's weights in order. Those in `names` are in FP8, each followed by its scales."""
    for name, weight in weights:
        if name not in names:
            yield name, weight
            continue
        quantized, scales = quantize_blocks(weight.to(device))
        yield name, quantized
        yield f"{name}{SCALE_SUFFIX}", scales


def check_form(quant_config: Any) -> None:
    """Raises ConfigError if a refit cannot write the format of a loaded vLLM model."""
    form = {name: getattr(quant_config, name, None) for name in ("weight_block_size", "activation_scheme")}
    if form != {name: _FORM[name] for name in form} or not quant_config.is_checkpoint_fp8_serialized:
        raise ConfigError(
            f"vLLM holds the generation model as {type(quant_config).__name__} with {form}; a refit writes plain ones, and "
            f"FP8 in blocks of {BLOCK}x{BLOCK}: set policy.generation.vllm_cfg.precision=fp8"
        )
