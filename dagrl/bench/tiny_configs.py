"""Tiny models of any architecture that transformers has: its default configuration with every size made small."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LAYERS = 4
_KEYS = {
    0: "altup_active_idx num_kv_shared_layers pad_token_id",
    1: "n_group topk_group first_k_dense_replace num_dense_layers bos_token_id",
    2: (
        "num_key_value_heads num_experts_per_tok moe_k top_k_experts linear_num_key_heads mamba_n_groups n_groups depth "
        "eos_token_id"
    ),
    4: (
        "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_experts "
        "num_local_experts n_routed_experts moe_num_experts index_n_heads linear_num_value_heads linear_num_heads"
    ),
    8: "mamba_num_heads mamba_n_heads mamba_dt_rank time_step_rank laurel_rank",
    16: "hidden_size_per_layer_input rotary_dim mamba_d_state ssm_state_size state_size patch_size",
    32: (
        "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size "
        "moe_shared_expert_intermediate_size q_lora_rank image_size head_dim global_head_dim "
        "qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim mamba_head_dim mamba_d_head linear_head_dim"
    ),
    64: "qk_rope_head_dim dim_model_base",
    96: (
        "intermediate_size ffn_dim ffn_hidden_size n_inner intermediate_size_mlp encoder_ffn_dim decoder_ffn_dim qk_head_dim"
    ),
    128: (
        "index_head_dim max_position_embeddings n_positions n_ctx hidden_size n_embd d_model dim word_embed_proj_dim "
        "out_hidden_size projection_dim embed_dim"
    ),
    256: "vocab_size vocab_size_per_layer_input mamba_d_ssm",
    512: "kv_lora_rank",
}
"""Small sizes by key, of those that vLLM's attention has on CPUs: heads of 32, and for MLA of 512 + 64."""
SIZES: Mapping[str, int] = {key: size for size, keys in _KEYS.items() for key in keys.split()}
"""Values by key, for keys that the configuration has and that are not None."""
EXTRA: Mapping[str, Mapping[str, Any]] = {
    "axk1": {"first_k_dense_replace": 0},  # vLLM wants a norm in dense layers that transformers does not have
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "mrope_section": [6, 5, 5]}}},
    "cosmos3_edge_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e8, "mrope_section": [8, 4, 4]}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8}, "max_seq_len": 128},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "deepseek_v32": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma4_text": {"global_head_dim": 64},
    "falcon": {"ffn_hidden_size": 512},
    "glm4_moe": {"head_dim": 32},
    "glm4v_moe_text": {"head_dim": 32, "use_qk_norm": False},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "granitemoehybrid": {"mamba_n_groups": 1},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 32, "route_norm": True, "qk_norm": True},
    "kimi_linear": {
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 128,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_dim": 128, "conv_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "llama4_text": {"num_experts_per_tok": 1},
    "longcat_flash": {
        "head_dim": 64,
        "moe_topk": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
        "zero_expert_num": 0,
    },
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "layernorm_epsilon": 1e-5,
        "partial_rotary_factor": 0.334,
        "rope_theta": 5e6,
        "swa_rope_theta": 1e4,
        "sliding_window_size": 128,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "add_swa_attention_sink_bias": True,
    },
    "ministral": {"head_dim": 32},
    "minimax_m2": {"rotary_dim": 16, "use_routing_bias": True, "scoring_func": "sigmoid"},
    "muse_glimmer_vision": {"output_dim": 256},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "moe"]},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 32,
        "output_gate_type": "silu",
    },
    "radio": {"video_temporal_patch_size": 2},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
    },
}
"""Keys that vLLM reads and published configurations have, but the class's default configuration lacks; by model type."""
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")

PREFIXED = {"CLIPVisionModel", "SiglipVisionModel", "Siglip2VisionModel"}
"""Encoders whose published checkpoints have a prefix that transformers drops on loading. It saves it only in models that it
has loaded, and vLLM expects it."""

KEPT = ("transformers_version", "architectures", "id2label", "label2id", "dtype")
"""Declared fields that are not sizes of the model."""


class NoTinyConfigError(Exception):
    """The architecture cannot be built tiny here."""


def tiny_model(architecture: str, seed: int) -> torch.nn.Module:
    """Returns transformers' model with random BF16 weights, all of them different from their initial values.

    Raises NoTinyConfigError if transformers has no such model, and what transformers does if it rejects the small sizes.
    """
    import torch

    built = transformers_class(architecture)
    if built is None:
        raise NoTinyConfigError("transformers has no model of this name, so there is no source")
    config = small_config(built.config_class)
    config.architectures = [architecture]
    model: torch.nn.Module = built(config).to(torch.bfloat16)
    if PREFIXED & {type(module).__name__ for module in model.modules()}:
        from transformers.conversion_mapping import get_model_conversion_mapping

        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)  # as of a loaded model
    generator = torch.Generator().manual_seed(seed)
    vectors = (buffer for buffer in model.buffers() if buffer.ndim == 1)  # not masks and decays
    for tensor in dict.fromkeys([*model.parameters(), *vectors]):
        if tensor.is_floating_point():
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator) / 8)
    return model


def transformers_class(architecture: str) -> Any:
    """Returns transformers' model for an architecture, or for another one that vLLM builds with the same class."""
    import transformers

    found = getattr(transformers, architecture, None)
    if found is None:
        from vllm.model_executor.models import registry

        classes = {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS}
        same = (name for name, built in classes.items() if built == classes.get(architecture))
        found = next((one for name in same if (one := getattr(transformers, name, None)) is not None), None)
    return None if found is None or found.__module__.endswith("dummy_pt_objects") else found


def small_config(kind: Any, keys: Mapping[str, Any] | None = None) -> Any:
    """Returns a small configuration of a class, in nested configurations too, with those of `keys` that it has."""
    small = _small(kind())
    for key, value in (keys or {}).items():
        if isinstance(value, Mapping):
            small[key] = {**small.get(key, {}), **value}
        elif key in {field.name for field in dataclasses.fields(kind)}:
            small[key] = value
    return kind(**small)


def _small(config: Any) -> dict[str, Any]:
    """Returns arguments for a small configuration of the same class. It derives itself what it derives from its sizes."""
    small: dict[str, Any] = {}
    declared = {field.name: field.default for field in dataclasses.fields(config)}
    depth = next((getattr(config, key) for key in DEPTHS if isinstance(getattr(config, key, None), int)), None)
    for key, default in declared.items():
        value = vars(config).get(key, default)
        if hasattr(value, "to_dict"):
            small[key] = {**_small(value), "model_type": value.model_type}
        elif key in DEPTHS and isinstance(value, int):
            small[key] = min(value, LAYERS)
        elif key in SIZES and value is not None and (key.endswith("_token_id") or not isinstance(value, dict | list)):
            small[key] = SIZES[key]
        elif isinstance(value, list) and depth is not None and len(value) == depth and default is not None:
            small[key] = value[:LAYERS]
        elif default is not None and value != default and key not in KEPT:
            small[key] = value
    if small.get("kv_lora_rank") and "num_key_value_heads" in small:  # MLA has as many as query heads
        small["num_key_value_heads"] = small["num_attention_heads"]
    return {**small, **EXTRA.get(config.model_type, {})}
