"""Scales of a KV cache in FP8: one for the keys and one for the values of each layer, carried by a refit like any weight.

Names are those of checkpoints that have them (`model.layers.3.self_attn.k_scale`). On Megatron's side every rank of a stage
holds its layers' scales (`workers.megatron.kv_scales`), in vLLM every rank all of them, where `Attention` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagrl.config import Json
from dagrl.errors import ConfigError
from dagrl.layout import ParallelLayout
from dagrl.refit.slices import WeightSlice
from workers.families.model import Derived, Model
from workers.families.registry import find_family

KINDS = ("k", "v")
FAMILIES = ("dense", "moe")
VLLM_RULE = "kv_scales"


def megatron_kv_scales(hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int) -> list[WeightSlice]:
    """The scales of the layers that `rank` holds, each a tensor of one element."""
    at = layout.coordinates(rank)
    return [
        _scale(hf_config, layer, kind, f"{megatron_attention(layout, stage, local)}.{kind}_scale")
        for stage in range(layout.vpp)
        for local, layer in enumerate(layout.stage_layers(Model(hf_config).layers, at.pp, stage))
        for kind in KINDS
    ]


def megatron_attention(layout: ParallelLayout, stage: int, local: int) -> str:
    """Name of the core attention of a stage's layer number `local`, counted from 0."""
    prefix = f"vp{stage}." if layout.vpp > 1 else ""
    return f"{prefix}decoder.layers.{local}.self_attention.core_attention"


def vllm_kv_scales(hf_config: Mapping[str, Json]) -> list[WeightSlice]:
    """The scales of all layers."""
    check_family(hf_config)
    return [
        _scale(hf_config, layer, kind, f"{_vllm_attention(hf_config, layer)}.{kind}_scale")
        for layer in range(Model(hf_config).layers)
        for kind in KINDS
    ]


def derived_kv_scales(hf_config: Mapping[str, Json]) -> list[Derived]:
    """Where vLLM must be given the scales after they were written."""
    tensors = tuple(f"{kind}_scale" for kind in KINDS)
    layers = range(Model(hf_config).layers)
    return [Derived(VLLM_RULE, _vllm_attention(hf_config, layer), tensors) for layer in layers]


def check_family(hf_config: Mapping[str, Json]) -> None:
    """Raise ConfigError for models whose KV cache is of another form."""
    family = find_family(hf_config).name
    if family not in FAMILIES:
        raise ConfigError(
            f"policy.generation.vllm_cfg.kv_cache_dtype is fp8, but {family} models keep other things in their cache than "
            f"keys and values, which are calibrated for {' and '.join(FAMILIES)} models; set kv_cache_dtype to auto"
        )


def _vllm_attention(hf_config: Mapping[str, Json], layer: int) -> str:
    return f"{find_family(hf_config).names.vllm_layer}.{layer}.self_attn.attn"


def _scale(hf_config: Mapping[str, Json], layer: int, kind: str, tensor: str) -> WeightSlice:
    names = find_family(hf_config).names
    return WeightSlice(f"{names.layer}.{layer}.self_attn.{kind}_scale", ((0, 1),), tensor, ((0, 1),), "float32")
