"""Weight slices of FP8 KV-cache scales: one scale for the keys and one for the values of each layer.

A refit carries them like weights. Names follow checkpoints that have them (`model.layers.3.self_attn.k_scale`). In Megatron
every rank of a stage holds the scales of its layers (`dagrl.workers.megatron.kv_scales`); in vLLM every rank holds all.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagrl.config import Json
from dagrl.errors import ConfigError
from dagrl.refit.slices import WeightSlice
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families import find_family
from dagrl.workers.families.hf_config import ModelConfig

KINDS = ("k", "v")
FAMILIES = ("dense", "moe")


def megatron_kv_scales(hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int) -> list[WeightSlice]:
    """Returns the scales of the layers that `rank` holds, each a tensor of one element."""
    at = layout.coordinates(rank)
    return [
        _scale(hf_config, layer, kind, f"{megatron_attention(layout, stage, local)}.{kind}_scale")
        for stage in range(layout.vpp)
        for local, layer in enumerate(layout.stage_layers(ModelConfig(hf_config).layers, at.pp, stage))
        for kind in KINDS
    ]


def megatron_attention(layout: ParallelLayout, stage: int, local: int) -> str:
    """Returns the name of the core attention in layer `local` of a stage, counted from 0."""
    prefix = f"vp{stage}." if layout.vpp > 1 else ""
    return f"{prefix}decoder.layers.{local}.self_attention.core_attention"


def vllm_kv_scales(hf_config: Mapping[str, Json]) -> list[WeightSlice]:
    """Returns the scales of all layers, in tensors that are named after vLLM's attention modules."""
    check_family(hf_config)
    layers = range(ModelConfig(hf_config).layers)
    tensor = "model.layers.{}.self_attn.attn.{}_scale"
    return [_scale(hf_config, layer, kind, tensor.format(layer, kind)) for layer in layers for kind in KINDS]


def check_family(hf_config: Mapping[str, Json]) -> None:
    """Raises ConfigError for models whose KV cache does not hold plain keys and values."""
    family = find_family(hf_config).name
    if family not in FAMILIES:
        raise ConfigError(
            f"policy.generation.vllm_cfg.kv_cache_dtype is fp8, but {family} models do not cache plain keys and "
            f"values. Scales can be calibrated for {' and '.join(FAMILIES)} models; set kv_cache_dtype to auto"
        )


def _scale(hf_config: Mapping[str, Json], layer: int, kind: str, tensor: str) -> WeightSlice:
    names = find_family(hf_config).names
    return WeightSlice(f"{names.layer}.{layer}.self_attn.{kind}_scale", ((0, 1),), tensor, ((0, 1),), "float32")
