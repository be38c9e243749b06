"""Compares the weight layout with real Megatron-Core modules; test_megatron_architecture.py runs it in its own process.

Builds every rank's model in turn. Names, shapes and all elements of every parameter and of the router's bias must agree.
Megatron's own `sharded_state_dict`, with which it writes layout-independent checkpoints, says which box of which global
tensor each local tensor holds. The global tensors come from a single rank with the whole model, so a slice that is sharded,
ordered or numbered differently names another element. That a single rank's tensors match their Hugging Face names is shown
by tests that compare logits with those of transformers.

With torch's fake process group one process can be any rank of any world. Megatron's norm and attention, which without
Transformer Engine do not support sequence or context parallelism, have stand-ins with the same weights that compute nothing.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn.functional import silu
from torch.testing._internal.distributed.fake_pg import FakeStore

from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron.groups import parallel_sizes
from dagrl.workers.megatron.weights import megatron_weight_slices
from tests.unit.refit.weight_reference import LATENT, Config, Weights, filled, hf_weights, layer_kind, megatron_tensors
from tests.unit.workers.test_megatron_architecture import REAL_CASES

Place = tuple[str, tuple[int, ...], tuple[int, ...]]  # global tensor, offset of a box in it, and the box's extents


def boxes_of(model: torch.nn.Module) -> Iterator[ShardedTensor]:
    """Returns Megatron's sharded state; its data are views of the live tensors."""
    for value in model.sharded_state_dict().values():
        if isinstance(value, ShardedTensorFactory):
            yield from value.build()
        elif isinstance(value, ShardedTensor):
            yield value


def fill(chunks: Mapping[str, torch.nn.Module], weights: Weights) -> None:
    """Fills every tensor of this rank; names and shapes must match."""
    held = {f"{prefix}{name}": tensor for prefix, chunk in chunks.items() for name, tensor in tensors_of(chunk).items()}
    found = {name: tuple(tensor.shape) for name, tensor in held.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert found == expected, sorted(found.items() ^ expected.items())
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(weights[name])


def global_tensors(config: Config, weights: Weights) -> Weights:
    """Assembles Megatron's global tensors, by checkpoint name, from a single rank."""
    alone = ParallelLayout()
    whole: Weights = {}
    with rank_of(alone, 0):
        chunks = build_chunks(config, alone)
        fill(chunks, megatron_tensors(weights, config, alone, 0))
        for box in boxes_of(chunks[""]):
            whole.setdefault(box.key, torch.full(box.global_shape, torch.nan))[box.global_slice()] = box.data
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def part_of(whole: Weights, box: ShardedTensor) -> torch.Tensor:
    """Returns the content of a box; 0 past the end of the vocabulary, whose padding depends on the layout."""
    known = whole[box.key][box.global_slice()]
    if not box.allow_shape_mismatch:
        return known
    out = torch.zeros(box.local_shape)
    out[: len(known)] = known
    return out


def check(config: Config, layout: ParallelLayout) -> None:
    """Checks that all ranks of a layout hold what our slices describe, and together every element of the model."""
    weights = hf_weights(config)
    whole = global_tensors(config, weights)
    replicas: defaultdict[Place, list[tuple[int, ...]]] = defaultdict(list)
    for rank in range(layout.world_size):
        like = megatron_tensors(weights, config, layout, rank)
        with rank_of(layout, rank):
            chunks = build_chunks(config, layout)
            fill(chunks, filled(weights, megatron_weight_slices(config, layout, rank), like))
            boxes = [box for chunk in chunks.values() for box in boxes_of(chunk)]
        assert sum(box.data.numel() for box in boxes) == sum(tensor.numel() for tensor in like.values())
        for box in boxes:
            assert torch.equal(box.data, part_of(whole, box)), (rank, box.key, box.global_offset)
            replicas[box.key, box.global_offset, box.local_shape].append(box.replica_id)
    for place, ids in replicas.items():
        assert len(set(ids)) == len(ids) and sum(not any(one) for one in ids) == 1, (place, ids)


class NotInstalled:
    """Megatron's latent attention checks for Transformer Engine classes even if that is not installed."""


def do_without_gpus() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment]


def main() -> None:
    from megatron.core.transformer import multi_latent_attention

    torch.set_num_threads(1)
    multi_latent_attention.TELinear = NotInstalled
    do_without_gpus()
    for config, layout in REAL_CASES:
        check(config, layout)
        print(config["model_type"], layout.describe(), "agrees", flush=True)


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


if __name__ == "__main__":
    main()
