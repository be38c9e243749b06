"""Compares the weight layout with real Megatron-Core modules; run by test_megatron_weights.py in a process of its own.

torch's fake process group lets one process be any rank of any world, so that every rank's GPTModel is built here in turn.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from dagrl.layout import ParallelLayout
from tests.unit.test_megatron_weights import REAL_LAYOUTS
from tests.unit.weight_reference import Config, hf_weights, is_moe, megatron_tensors, model_config


def transformer_config(config: Config, layout: ParallelLayout) -> TransformerConfig:
    layers = config["num_hidden_layers"]
    assert isinstance(layers, int)
    experts = {
        "num_moe_experts": config.get("num_experts"),
        "moe_ffn_hidden_size": config.get("moe_intermediate_size"),
        "moe_layer_freq": [int(is_moe(config, layer)) for layer in range(layers)],
        "moe_router_topk": 2,
    }
    return TransformerConfig(
        num_layers=layers,
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=config["model_type"] == "qwen2",
        qk_layernorm=str(config["model_type"]).startswith("qwen3"),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **(experts if config["model_type"] == "qwen3_moe" else {}),
    )


def shapes_on(config: Config, layout: ParallelLayout, rank: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what Megatron-Core builds on `rank`."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    options = transformer_config(config, layout)
    found: dict[str, tuple[int, ...]] = {}
    for stage in range(layout.vpp):
        virtual = stage if layout.vpp > 1 else None
        model = GPTModel(
            config=options,
            transformer_layer_spec=get_gpt_decoder_block_spec(
                options, use_transformer_engine=False, normalization="RMSNorm", vp_stage=virtual
            ),
            vocab_size=-(-int(str(config["vocab_size"])) // (128 * layout.tp)) * 128 * layout.tp,
            max_sequence_length=32,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
            share_embeddings_and_output_weights=bool(config["tie_word_embeddings"]),
            position_embedding_type="rope",
            vp_stage=virtual,
        )
        prefix = f"vp{stage}." if layout.vpp > 1 else ""
        found |= {f"{prefix}{name}": tuple(parameter.shape) for name, parameter in model.named_parameters()}
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


def main() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment]
    for index, (model_type, layout) in enumerate(REAL_LAYOUTS):
        config = model_config(model_type, tie_word_embeddings=index % 2 == 0)
        weights = hf_weights(config)
        for rank in range(layout.world_size):
            expected = {name: tuple(t.shape) for name, t in megatron_tensors(weights, config, layout, rank).items()}
            found = shapes_on(config, layout, rank)
            assert found == expected, (model_type, layout, rank, sorted(found.items() ^ expected.items()))
        print(model_type, layout.describe(), "agrees")


if __name__ == "__main__":
    main()
