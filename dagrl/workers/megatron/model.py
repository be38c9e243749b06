"""Builds this rank's part of a Megatron-Core GPTModel of local layers from a Hugging Face configuration.

`attention.py` has what computes attention. Weights stay uninitialized; `dagrl.workers.train.hf_load`
fills them. Imported only where Megatron is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dagrl.config import MegatronConfig, PolicyConfig
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families.megatron import padded_vocabulary
from dagrl.workers.megatron.architecture import Architecture
from dagrl.workers.megatron.attention import CausalAttention, LayerInputs, NormedHeads, RMSNorm
from dagrl.workers.megatron.experts import GroupedExperts, LocalDispatcher, experts_last_first
from dagrl.workers.megatron.groups import parallel_sizes
from dagrl.workers.megatron.latent import LatentAttention
from dagrl.workers.megatron.router import Router, pass_tokens_to_routers
from dagrl.workers.megatron.versions import do_without_engine, use_expert_parts
from dagrl.workers.train.logprobs import OutputLayer, VocabularyShard, add_product

ADAPTERS = "adapters"  # name of the module with a layer's LoRA adapters
EXPERT_BIAS = "router.expert_bias"  # how the name of a router's bias ends

Named = TypeVar("Named", bound=Tensor)


class HiddenStatesModel(GPTModel):  # type: ignore[misc]
    """A GPTModel that ends before its output layer and takes explicit token positions.

    The logits of a microbatch would dominate its memory. `dagrl.workers.train.logprobs` computes them in chunks.
    """

    def forward(self, tokens: Tensor, positions: Tensor, inputs: LayerInputs | None) -> Tensor:
        """Returns the last hidden states [b, s, hidden size] on the last pipeline stage, for `tokens` and `positions` [b,
        s].

        All rows have the positions of the first.
        """
        self.rotary_pos_emb.positions = positions[0]
        if self.config.multi_latent_attention:
            angles = self.rotary_pos_emb().chunk(2, -1)[0]
            inputs = replace(inputs or LayerInputs(None, None), angles=angles)
        hidden: Tensor = super().forward(tokens, positions, None, packed_seq_params=inputs)
        return hidden

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields parameters in the order in which Megatron lays out its buffers."""
        return experts_last_first(super().named_parameters(*args, **options))

    def output_weight(self) -> Tensor:
        """Returns this worker's rows of the output layer [rows, hidden size], on the last pipeline stage."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        # As before Megatron's output layer: each worker's gradient is a share of a sum over the vocabulary.
        if self.config.sequence_parallel:
            hidden: Tensor = gather_from_sequence_parallel_region(hidden_states).transpose(0, 1).contiguous()
            return hidden
        # Transpose first: Megatron's all-reduce loses a non-contiguous gradient (`mappings._reduce`).
        hidden = copy_to_tensor_model_parallel_region(hidden_states.transpose(0, 1).contiguous())
        return hidden


class ScalarHead(torch.nn.Linear):
    """The output layer of a model with one number per token."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns float32 numbers [s, b] of `hidden` [s, b, hidden size]."""
        return (hidden.float() @ self.weight.float().T).squeeze(-1)


class ScalarHeadModel(HiddenStatesModel):
    """A model that gives one number per token [b, s] in place of hidden states: a critic, or a reward model."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.post_process:
            self.output_layer = ScalarHead(self.config)

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        # All tensor-parallel workers compute the same numbers, so each has the whole gradient and not a share of a sum.
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        numbers: Tensor = self.output_layer(hidden_states)
        return numbers.T.contiguous()


class PositionRotary(torch.nn.Module):
    """Rotary embedding of given positions. Megatron's counts every row from 0."""

    positions: Tensor  # [s]

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Returns angles [s, 1, 1, rotary_dim]."""
        angles = torch.outer(self.positions.float(), self.inv_freq)  # type: ignore[arg-type]
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Returns the length that Megatron passes to `forward`."""
        return len(self.positions)


@dataclass(frozen=True)
class ModelChunks:
    """The model chunks of this rank: one, or one per virtual pipeline stage in order."""

    architecture: Architecture
    config: TransformerConfig
    chunks: tuple[HiddenStatesModel, ...]

    @property
    def vocabulary_shard(self) -> VocabularyShard:
        """The part of the vocabulary that this rank's logits cover."""
        size, rank = self.config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
        columns = padded_vocabulary(self.architecture.vocabulary, size) // size
        rows = min(max(self.architecture.vocabulary - rank * columns, 0), columns)
        return VocabularyShard(rank * columns, rows, parallel_state.get_tensor_model_parallel_group() if size > 1 else None)

    def output_layer(self, temperature: float, chunk_tokens: int | None) -> OutputLayer | None:
        """Returns this rank's rows of the output layer; None if another pipeline stage has it, or for a scalar head."""
        last = self.chunks[-1]
        if not last.post_process or self.architecture.scalar:
            return None
        shared = last.share_embeddings_and_output_weights and last.pre_process
        return OutputLayer(last.output_weight(), self.vocabulary_shard, temperature, chunk_tokens, shared=shared)

    def init_scalar_head(self, deviation: float, seed: int) -> None:
        """Draws a scalar head from a normal distribution, the same on every worker that holds it."""
        last = self.chunks[-1]
        if last.post_process:
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.empty(last.output_weight().shape).normal_(0, deviation, generator=generator)
            last.output_weight().data.copy_(drawn)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Returns parameters by Megatron's name, with the prefix `vp{stage}.` if there are virtual stages. No adapters."""
        named = self._named(chunk.named_parameters() for chunk in self.chunks)
        return {name: parameter for name, parameter in named if f".{ADAPTERS}." not in name}

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Returns the parameters that training changes: all, or with LoRA the adapters alone."""
        named = self._named(chunk.named_parameters() for chunk in self.chunks)
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def expert_biases(self) -> dict[str, Tensor]:
        """Returns the routers' biases by Megatron's name. Training leaves them as they are."""
        named = self._named(chunk.named_buffers() for chunk in self.chunks)
        return {name: bias for name, bias in named if name.endswith(EXPERT_BIAS)}

    def _named(self, tensors: Iterable[Iterable[tuple[str, Named]]]) -> Iterator[tuple[str, Named]]:
        for stage, named in enumerate(tensors):
            prefix = f"vp{stage}." if len(self.chunks) > 1 else ""
            yield from ((f"{prefix}{name}", tensor) for name, tensor in named)

    def weights(self) -> dict[str, Tensor]:
        """Returns everything that a checkpoint of the model has: `parameters()` and `expert_biases()`."""
        return {**self.parameters(), **self.expert_biases()}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the live tensors of `weights()`."""
        return {name: weight.data for name, weight in self.weights().items()}

    def forget_microbatches(self) -> None:
        """Drops references of Megatron's layers to the last microbatch, so that the model can be garbage collected.

        Token dispatchers keep the router's probabilities with their autograd graph, whose leaves have hooks that refer to
        the model. This cycle runs through C++, where Python's collector cannot see it.
        """
        for chunk in self.chunks:
            for layer in chunk.modules():
                if isinstance(layer, MoELayer):
                    layer.token_dispatcher.probs = layer.router.tokens = None


def build_model(
    architecture: Architecture, policy: PolicyConfig, layout: ParallelLayout, device: torch.device
) -> ModelChunks:
    """Builds this rank's part of the model on `device`. Megatron's model parallel groups must be initialized."""
    do_without_engine()
    config = transformer_config(architecture, policy, layout)
    chunks = tuple(_build_chunk(architecture, config, layout, stage).to(device) for stage in range(layout.vpp))
    for chunk in chunks:
        for part in chunk.modules():
            if isinstance(part, CausalAttention):
                window = architecture.windows[part.layer]
                part.window = window if window and window < policy.max_total_sequence_length else None
            elif isinstance(part, GroupedExperts):
                part.join_weights()
            elif isinstance(part, MoELayer) and part.token_dispatcher.ep_size == part.token_dispatcher.tp_size == 1:
                part.token_dispatcher = LocalDispatcher(part.router)
    return ModelChunks(architecture, config, chunks)


def transformer_config(architecture: Architecture, policy: PolicyConfig, layout: ParallelLayout) -> TransformerConfig:
    """Returns Megatron's model configuration: no fusion that needs a compiled extension; gradients are sums.

    On a GPU the rotary embedding is our own kernel.
    """

    def leave(weight: Tensor) -> Tensor:
        return weight

    dtype = getattr(torch, policy.precision)
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    kind = MLATransformerConfig if architecture.latent else TransformerConfig
    config = kind(
        **_sizes(architecture),
        **_latent(architecture),
        **_parallelism(architecture, policy, layout),
        **(recomputed if policy.megatron_cfg.activation_checkpointing else {}),
        **(_experts(architecture, policy.megatron_cfg) if architecture.experts else {}),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        # Weights come from a checkpoint. `perform_initialization` stays on because it marks tensor-parallel parameters;
        # otherwise the gradient norm would count them on one worker only.
        init_method=leave,
        output_layer_init_method=leave,
        embedding_init_method=leave,
        # Losses are sums over the global batch. Otherwise Megatron divides by microbatches and data-parallel workers.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    if not policy.peft.enabled:  # a merged weight has no buffer
        layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = AddedGradients, True
        config.gradient_accumulation_fusion = True
    if torch.cuda.is_available():
        from dagrl.workers.megatron.triton_kernels import use_layer_kernels

        use_layer_kernels(config)
    return config


def _sizes(architecture: Architecture) -> dict[str, Any]:
    return {
        "num_layers": architecture.layers,
        "hidden_size": architecture.hidden,
        "ffn_hidden_size": architecture.ffn,
        "num_attention_heads": architecture.heads,
        "num_query_groups": architecture.kv_heads,
        "kv_channels": architecture.head_dim,
        "softmax_scale": rotary_frequencies(architecture)[1] ** 2 / math.sqrt(architecture.head_dim),
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.norm_eps,
        "qk_layernorm": architecture.qk_norm or architecture.latent is not None,
        "add_bias_linear": False,
        "add_qkv_bias": architecture.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _latent(architecture: Architecture) -> dict[str, Any]:
    latent, rope = architecture.latent, architecture.rope
    if latent is None:
        return {}
    scaled = rope["rope_type"] != "default"
    return {
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.rank,
        "qk_head_dim": latent.plain,
        "qk_pos_emb_head_dim": latent.rotated,
        "v_head_dim": latent.values,
        "rope_type": "rope",  # `LatentAttention` rotates; these give the scale of the products of queries and keys
        "rotary_scaling_factor": rope["factor"] if scaled else 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


def _parallelism(architecture: Architecture, policy: PolicyConfig, layout: ParallelLayout) -> dict[str, Any]:
    return {
        **parallel_sizes(layout),
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        # Megatron requires sequence parallelism for experts with tensor parallelism.
        "sequence_parallel": layout.tp > 1 and (policy.megatron_cfg.sequence_parallel or architecture.experts > 0),
        # With two stages, an interleaved schedule has two simultaneous transfers between the same workers. Batched, they
        # are silently swapped (megatron/training/arguments.py requires more than two stages).
        "batch_p2p_comm": layout.vpp == 1,
        "moe_token_dispatcher_type": "alltoall",
        "overlap_p2p_comm": layout.vpp > 1,
    }


def _experts(architecture: Architecture, settings: MegatronConfig) -> dict[str, Any]:
    return {
        "num_moe_experts": architecture.experts,
        "moe_router_topk": architecture.experts_per_token,
        "moe_ffn_hidden_size": architecture.expert_ffn,
        "moe_layer_freq": [int(experts) for experts in architecture.moe_layers],
        "moe_grouped_gemm": False,  # needs an extension; `layer_specs` replaces the sequential experts by ours
        "moe_router_load_balancing_type": "aux_loss" if settings.moe_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": settings.moe_aux_loss_coeff,
        "moe_permute_fusion": False,
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "sigmoid" if architecture.expert_bias else "softmax",
        "moe_router_enable_expert_bias": architecture.expert_bias,
        "moe_router_num_groups": architecture.expert_groups if architecture.expert_groups > 1 else None,
        "moe_router_group_topk": architecture.groups_per_token if architecture.expert_groups > 1 else None,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": architecture.expert_scale if architecture.expert_bias else None,
        "moe_shared_expert_intermediate_size": architecture.shared_ffn or None,
        # A softmax over the chosen experts equals the softmax over all, normalized over the chosen.
        "moe_router_pre_softmax": not architecture.normalize_expert_weights,
    }


def _build_chunk(
    architecture: Architecture, config: TransformerConfig, layout: ParallelLayout, stage: int
) -> HiddenStatesModel:
    virtual = stage if layout.vpp > 1 else None
    kind = ScalarHeadModel if architecture.scalar else HiddenStatesModel
    model = kind(
        config=config,
        transformer_layer_spec=layer_specs(config, virtual),
        vocab_size=padded_vocabulary(architecture.vocabulary, layout.tp),
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        rotary_base=architecture.rope["rope_theta"],
        vp_stage=virtual,
    )
    frequencies, growth = rotary_frequencies(architecture)
    model.rotary_pos_emb = PositionRotary(frequencies)
    for part in model.modules():
        if isinstance(part, LatentAttention):
            part.growth = growth
    pass_tokens_to_routers(model)
    if model.pre_process and architecture.constant_row is not None:
        model.embedding.word_embeddings.register_forward_hook(partial(_keep_row, architecture.constant_row))
    return model


def _keep_row(token: int, embedding: layers.VocabParallelEmbedding, inputs: tuple[Tensor], output: Tensor) -> None:
    """Drops the gradient of a token's row. `output` is [b, s, hidden size], or with sequence parallelism [s / tp, b, hidden
    size]."""
    if not output.requires_grad:
        return
    rows = inputs[0] == token  # [b, s]
    if embedding.reduce_scatter_embeddings:
        rows = rows.T.chunk(embedding.tp_group.size())[embedding.tp_group.rank()]
    output.register_hook(lambda gradient: gradient.masked_fill(rows[..., None], 0))  # type: ignore[no-untyped-call]


def layer_specs(config: TransformerConfig, virtual: int | None) -> Any:
    """Returns Megatron's local layer specifications with our attention, norms, router and experts."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=virtual)
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention.core_attention = CausalAttention
        if config.multi_latent_attention:
            layer.submodules.self_attention.module = LatentAttention
            attention.q_layernorm = attention.kv_layernorm = RMSNorm
        elif config.qk_layernorm:
            layer.submodules.self_attention.module = NormedHeads
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        use_expert_parts(parts, GroupedExperts, Router)
    return block


def rotary_frequencies(architecture: Architecture) -> tuple[Tensor, float]:
    """Returns frequencies [rotary_dim / 2] as transformers scales them, and by how much rotated queries and keys grow."""
    rope: dict[str, Any] = dict(architecture.rope)
    if rope["rope_type"] == "default":
        steps = torch.arange(0, architecture.rotary_dim, 2, dtype=torch.int64).float() / architecture.rotary_dim
        return 1.0 / torch.pow(float(rope["rope_theta"]), steps), 1.0
    sizes = {
        "hidden_size": architecture.hidden,
        "num_attention_heads": architecture.heads,
        "head_dim": architecture.latent.rotated if architecture.latent else architecture.head_dim,
    }
    config = PretrainedConfig(rope_parameters=rope, max_position_embeddings=architecture.max_positions, **sizes)
    frequencies, growth = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return frequencies.float(), float(growth)


class AddedGradients:
    """In place of the extension `fused_weight_gradient_mlp_cuda`, whose functions Megatron's linear layers call.

    Apex and Transformer Engine have the extension. Without one, a weight's gradient is rounded to bfloat16, written, and
    added to the float32 buffer in another pass.
    """

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
        """Adds the weight gradient of `inputs` [n, columns] and `gradient` [n, rows] to `total` [rows, columns]."""
        add_product(total, gradient.T, inputs)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
