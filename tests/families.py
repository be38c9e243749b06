"""Tiny models of every family, as `config.json` has them: what tests of weight layouts share."""

from pathlib import Path
from typing import Any

import torch

Hf = dict[str, Any]

_BASE: Hf = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_EXPERTS: Hf = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}

_LATENT: Hf = {
    **_BASE,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}

FAMILIES: dict[str, Hf] = {
    "llama": {**_BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen2": {**_BASE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {**_BASE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "qwen3_moe": {
        **_BASE,
        **_EXPERTS,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        **_BASE,
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "partial_rotary_factor": 0.5,
    },
    "mixtral": {
        **_BASE,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "deepseek_v3": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
    },
}


def random_model(config: Hf, directory: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns a model of transformers', and its checkpoint under the names of published ones."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {key: value for key, value in config.items() if key != "model_type"}
    settings = AutoConfig.for_model(config["model_type"], **keys)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = 0.3 * torch.randn(tensor.shape)
            tensor.copy_(1 + noise if name.endswith("norm.weight") else noise)
    model.save_pretrained(directory)
    return model, load_file(directory / "model.safetensors")
