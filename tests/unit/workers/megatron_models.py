"""Real Megatron-Core models of every family on any rank of any layout, in one process without a GPU.

With torch's fake process group one process can be any rank of any world. Megatron's norm and attention, which without
Transformer Engine do not support sequence or context parallelism, have stand-ins with the same weights that compute nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn.functional import silu
from torch.testing._internal.distributed.fake_pg import FakeStore

from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron.groups import parallel_sizes
from tests.unit.refit.weight_reference import LATENT, Config, layer_kind


@contextmanager
def rank_of(layout: ParallelLayout, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    parallel_state.initialize_model_parallel(**parallel_sizes(layout), create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build_chunks(config: Config, layout: ParallelLayout) -> dict[str, torch.nn.Module]:
    """Builds Megatron-Core's models on the current rank: one per virtual stage, by the prefix of its tensor names."""
    options = transformer_config(config, layout)
    if layout.vpp == 1:
        return {"": build(config, options, layout, None)}
    return {f"vp{stage}.": build(config, options, layout, stage) for stage in range(layout.vpp)}


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    biases = [item for item in model.named_buffers() if item[0].endswith("expert_bias")]
    return dict([*model.named_parameters(), *biases])


def transformer_config(c: Config, layout: ParallelLayout) -> TransformerConfig:
    kind, layers = c["model_type"], c["num_hidden_layers"]
    kinds = [layer_kind(c, layer) for layer in range(layers)]
    count = c.get("n_routed_experts") or c.get("num_experts") or c.get("num_local_experts")
    latent, scored = kind in LATENT, kind in ("deepseek_v3", "glm4_moe")
    options: dict[str, Any] = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": silu}
    options |= {"num_layers": layers, "hidden_size": c["hidden_size"], "ffn_hidden_size": c["intermediate_size"]}
    options |= {"num_attention_heads": c["num_attention_heads"], "num_query_groups": c["num_key_value_heads"]}
    options |= {"kv_channels": c["head_dim"], "add_bias_linear": False, "pipeline_dtype": torch.float32}
    options["add_qkv_bias"] = kind.startswith("qwen2") or c.get("attention_bias", False)
    options["qk_layernorm"] = kind.startswith("qwen3") or latent or c.get("use_qk_norm", False)
    if "E" in kinds:
        width, shared = c.get("moe_intermediate_size", 0), c.get("n_shared_experts") or 0
        options |= {"num_moe_experts": count, "moe_ffn_hidden_size": width or c["intermediate_size"], "moe_router_topk": 2}
        options |= {"moe_layer_freq": [int(one == "E") for one in kinds], "moe_router_enable_expert_bias": scored}
        options["moe_router_score_function"] = "sigmoid" if scored else "softmax"
        options["moe_shared_expert_intermediate_size"] = shared * width or None
    if latent:
        options |= {"q_lora_rank": c["q_lora_rank"], "kv_lora_rank": c["kv_lora_rank"], "rope_type": "rope"}
        options |= {"qk_head_dim": c["qk_nope_head_dim"], "qk_pos_emb_head_dim": c["qk_rope_head_dim"]}
        options["v_head_dim"] = c["v_head_dim"]
    off = ("perform_initialization", "gradient_accumulation_fusion", "bias_activation_fusion", "persist_layer_norm")
    return (MLATransformerConfig if latent else TransformerConfig)(
        **parallel_sizes(layout),
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        sequence_parallel=layout.tp > 1 and "E" in kinds,
        use_cpu_initialization=True,
        **dict.fromkeys((*off, "masked_softmax_fusion"), False),
        **options,
    )


def build(config: Config, options: TransformerConfig, layout: ParallelLayout, virtual: int | None) -> torch.nn.Module:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual)
    rows = -(-config["vocab_size"] // (128 * layout.tp)) * 128 * layout.tp
    common = {"vocab_size": rows, "max_sequence_length": 32, "pre_process": first, "post_process": last}
    common |= {"share_embeddings_and_output_weights": config["tie_word_embeddings"], "position_embedding_type": "rope"}
    spec = get_gpt_decoder_block_spec(options, use_transformer_engine=False, normalization="RMSNorm", vp_stage=virtual)
    use_own_norms(spec, options)
    return GPTModel(config=options, transformer_layer_spec=spec, vp_stage=virtual, **common)  # type: ignore[no-any-return]


def use_own_norms(spec: Any, options: TransformerConfig) -> None:
    """Replaces the local spec's norms and attention, which do not support sequence and context parallelism."""
    spec.layer_norm = Norm
    for layer in spec.layer_specs:
        submodules = layer.submodules
        submodules.self_attention.submodules.core_attention = NoAttention
        submodules.input_layernorm = submodules.pre_mlp_layernorm = Norm
        attention = submodules.self_attention.submodules
        if options.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = attention.kv_layernorm = Norm


class NoAttention(torch.nn.Module):
    """Stand-in without weights; Megatron's own does not support context parallelism."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class Norm(torch.nn.RMSNorm):
    """Stand-in; Megatron's own does not support sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
