"""Real Megatron-Core models of every family on any rank of any layout, in one process without a GPU.

With torch's fake process group one process can be any rank of any world. Missing dependencies of Megatron's layers have
stand-ins with the same weights that compute nothing: its norm and attention (without Transformer Engine they do not
support sequence or context parallelism), and the norm of `mamba_ssm`, which Megatron's own `ExtendedRMSNorm` derives from.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families.megatron import MegatronModules
from dagrl.workers.megatron.groups import parallel_sizes
from tests.unit.refit.weight_reference import LATENT, Config, layer_kind


@contextmanager
def rank_of(layout: ParallelLayout, rank: int) -> Iterator[None]:
    """Makes this process `rank` of a world of `layout`."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    parallel_state.initialize_model_parallel(**parallel_sizes(layout), create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build_chunks(config: Config, layout: ParallelLayout, modules: MegatronModules) -> dict[str, torch.nn.Module]:
    """Builds Megatron-Core's models on the current rank: one per virtual stage, by the prefix of its tensor names."""
    options = transformer_config(config, layout)
    options.moe_grouped_gemm = modules.grouped_experts
    if layout.vpp == 1:
        return {"": build(config, options, layout, modules, None)}
    return {f"vp{stage}.": build(config, options, layout, modules, stage) for stage in range(layout.vpp)}


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns every parameter and the router's bias."""
    biases = [item for item in model.named_buffers() if item[0].endswith("expert_bias")]
    return dict([*model.named_parameters(), *biases])


def transformer_config(c: Config, layout: ParallelLayout) -> TransformerConfig:
    kind, layers = c["model_type"], c["num_hidden_layers"]
    kinds = [layer_kind(c, layer) for layer in range(layers)]
    count = c.get("n_routed_experts") or c.get("num_experts") or c.get("num_local_experts")
    hybrid, latent = kind == "nemotron_h", kind in LATENT
    scored = hybrid or kind in ("deepseek_v3", "glm4_moe")
    options: dict[str, Any] = {}
    if "E" in kinds:
        options |= {
            "num_moe_experts": count,
            "moe_ffn_hidden_size": c.get("moe_intermediate_size") or c["intermediate_size"],
            "moe_layer_freq": 1 if hybrid else [int(one == "E") for one in kinds],
            "moe_router_topk": 2,
            "moe_router_score_function": "sigmoid" if scored else "softmax",
            "moe_router_enable_expert_bias": scored,
            "moe_shared_expert_intermediate_size": shared_width(c),
            "moe_shared_expert_gate": kind == "qwen2_moe",
        }
    if latent:
        options |= {
            "q_lora_rank": c["q_lora_rank"],
            "kv_lora_rank": c["kv_lora_rank"],
            "qk_head_dim": c["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": c["qk_rope_head_dim"],
            "v_head_dim": c["v_head_dim"],
            "rope_type": "rope",
        }
    if hybrid:
        options |= {
            "mamba_num_heads": c["mamba_num_heads"],
            "mamba_head_dim": c["mamba_head_dim"],
            "mamba_num_groups": c["n_groups"],
            "mamba_state_dim": c["ssm_state_size"],
            "moe_latent_size": c.get("moe_latent_size"),
            "is_hybrid_model": True,
        }
    return (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=layers,
        hidden_size=c["hidden_size"],
        ffn_hidden_size=c["intermediate_size"],
        num_attention_heads=c["num_attention_heads"],
        num_query_groups=c["num_key_value_heads"],
        kv_channels=c["head_dim"],
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=kind.startswith("qwen2") or c.get("attention_bias", False),
        qk_layernorm=kind.startswith("qwen3") or latent or c.get("use_qk_norm", False),
        gated_linear_unit=not hybrid,
        activation_func=torch.nn.functional.silu,
        pipeline_dtype=torch.float32,
        **parallel_sizes(layout),
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        sequence_parallel=layout.tp > 1 and "E" in kinds,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **options,
    )


def shared_width(c: Config) -> int | None:
    if c["model_type"] == "qwen2_moe":
        return int(c["shared_expert_intermediate_size"])
    if not c.get("n_shared_experts"):
        return None
    return int(c["n_shared_experts"] * c.get("moe_shared_expert_intermediate_size", c["moe_intermediate_size"]))


def build(
    config: Config, options: TransformerConfig, layout: ParallelLayout, modules: MegatronModules, virtual: int | None
) -> torch.nn.Module:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual)
    common = {
        "vocab_size": -(-config["vocab_size"] // (128 * layout.tp)) * 128 * layout.tp,
        "max_sequence_length": 32,
        "pre_process": first,
        "post_process": last,
        "share_embeddings_and_output_weights": config["tie_word_embeddings"],
        "position_embedding_type": "rope",
    }
    if config["model_type"] == "nemotron_h":
        from megatron.core.models.mamba import MambaModel

        pattern = config["hybrid_override_pattern"]
        spec = hybrid_spec(local=not modules.transformer_engine)
        return MambaModel(options, spec, hybrid_override_pattern=pattern, **common)  # type: ignore[no-any-return]
    fused = modules.transformer_engine
    spec = get_gpt_decoder_block_spec(options, use_transformer_engine=fused, normalization="RMSNorm", vp_stage=virtual)
    if not fused:
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


class GatedNorm(torch.nn.Module):
    """`mamba_ssm`'s RMSNormGated: one weight as wide as the rank's heads. Megatron's own class derives from it."""

    def __init__(self, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))


def hybrid_spec(local: bool) -> ModuleSpec:
    """Returns Megatron's hybrid stack. `local`: with its local linear layers and norms, not Transformer Engine's."""
    stand_in_for_kernels()
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
    from megatron.core.ssm import mamba_block, mamba_mixer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    mamba_mixer.get_cuda_rng_tracker = MagicMock()
    if not local:
        return mamba_stack_spec
    mamba_block.TENorm = Norm
    layers = mamba_stack_spec.submodules
    mixer, attention, mlp = layers.mamba_layer.submodules, layers.attention_layer.submodules, layers.mlp_layer.submodules
    mixer.norm = attention.input_layernorm = mlp.pre_mlp_layernorm = layers.moe_layer.submodules.pre_mlp_layernorm = Norm
    mixer.mixer.submodules.in_proj, mixer.mixer.submodules.out_proj = ColumnParallelLinear, RowParallelLinear
    inner = attention.self_attention.submodules
    inner.linear_qkv, inner.core_attention, inner.linear_proj = ColumnParallelLinear, NoAttention, RowParallelLinear
    mlp.mlp.submodules.linear_fc1, mlp.mlp.submodules.linear_fc2 = ColumnParallelLinear, RowParallelLinear
    layers.moe_layer.submodules.mlp = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)
    return mamba_stack_spec


def stand_in_for_kernels() -> None:
    """Installs stubs of the kernel modules that Megatron's Mamba imports. Must run before its first import."""
    for name in ("triton", "triton.language"):
        sys.modules.setdefault(name, MagicMock())
    if find_spec("mamba_ssm") is None:
        for name in ("layernorm_gated", "ssd_combined", "selective_state_update"):
            sys.modules.setdefault(f"mamba_ssm.ops.triton.{name}", MagicMock(RMSNorm=GatedNorm))
