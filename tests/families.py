"""Tiny models of every family, as `config.json` has them: what tests of weight layouts share."""

from pathlib import Path
from typing import Any

import torch

Hf = dict[str, Any]

_BASE: Hf = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}
_BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
_BASE["tie_word_embeddings"] = False
_CHOSEN: Hf = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
_EXPERTS: Hf = {**_CHOSEN, "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": [0]}
_SHARED: Hf = {**_CHOSEN, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}
_LATENT: Hf = {**_SHARED, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 48, "v_head_dim": 16}
_LATENT |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
_LATENT |= {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_GLM: Hf = {**_SHARED, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5}


def _family(kind: str, **keys: Any) -> Hf:
    architecture = f"{kind.title().replace('_', '')}ForCausalLM"
    return {**_BASE, "model_type": kind, "architectures": [architecture], **keys}


FAMILIES: dict[str, Hf] = {
    "llama": _family("llama"),
    "qwen2": _family("qwen2"),
    "qwen3": _family("qwen3", tie_word_embeddings=True),
    "qwen3_moe": _family("qwen3_moe", **_EXPERTS),
    "glm4_moe": _family("glm4_moe", **_GLM, routed_scaling_factor=2.5),
    "mixtral": _family("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "deepseek_v3": _family("deepseek_v3", **_LATENT),
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
