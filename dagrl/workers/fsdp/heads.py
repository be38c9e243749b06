"""Qwen3's attention with fewer products and passes over memory, where one rank has all weights and layers keep activations.

One product computes queries, keys and values, whose weights are rows of one matrix among `ComputeCopies`. Then one kernel,
that of Megatron's layers, normalizes and rotates them. Imported only where Triton is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.models.qwen3.modeling_qwen3 import ALL_ATTENTION_FUNCTIONS, Qwen3Model, eager_attention_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel

from dagrl.workers.megatron.triton_kernels import heads_gradients, write_heads

DECODERS = (Qwen3Model, Qwen3MoeModel)
"""Decoders whose attention is the same, in transformers 5.17 to 5.19. Their subclasses may have another."""


def fuse_attention(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives a decoder's layers `FusedAttention` where their weights are to have copies in another `dtype`.

    Projections with biases or adapters stay as they are.
    """
    decoders: list[Any] = [part for part in model.modules() if type(part) in DECODERS]
    for decoder in decoders:
        for attention in (layer.self_attn for layer in decoder.layers):
            parts = [[*getattr(attention, name).named_parameters()] for name in FusedAttention.joined_weights]
            if all([name for name, _ in part] == ["weight"] and part[0][1].dtype != dtype for part in parts):
                attention.__class__ = FusedAttention


class FusedAttention(nn.Module):
    """Qwen3's attention, of which it has all attributes. It runs only while copies are in place."""

    joined_weights = ("q_proj", "k_proj", "v_proj")

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any,
        past_key_values: None = None,
        **given: Any,
    ) -> tuple[Tensor, Any]:
        assert past_key_values is None, "training has no cache"
        norms, sizes = (self.q_norm.weight, self.k_norm.weight), (self.q_norm.variance_epsilon, self.num_key_value_groups)
        mixed = linear(hidden_states, self.joint)
        heads = _Heads.apply(mixed, *norms, *position_embeddings, *sizes)  # type: ignore[no-untyped-call]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        options = {"scaling": self.scaling, "sliding_window": self.sliding_window}
        options["dropout"] = self.attention_dropout if self.training else 0.0
        out, weights = attend(self, *(head.transpose(1, 2) for head in heads), attention_mask, **options, **given)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(*inputs[:5])
        ctx.sizes = inputs[5:]
        queries, keys = torch.ops.dagrl.heads.default(*inputs)
        values = inputs[0].detach()[..., -keys.shape[2] * keys.shape[3] :].view(keys.shape)  # saved with the input
        return queries, keys, values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, norm, *others = ctx.saved_tensors  # once, as recomputed ones are freed
        grad, of_norms = torch.ops.dagrl.heads_backward.default(*grads, mixed, norm, *others, *ctx.sizes)
        of_queries, of_keys = of_norms.to(norm.dtype)
        return grad, of_queries, of_keys, None, None, None, None


_INPUTS = "Tensor mixed, Tensor query_norm, Tensor key_norm, Tensor cos, Tensor sin, float eps, int ratio"
torch.library.define("dagrl::heads", f"({_INPUTS}) -> (Tensor, Tensor)")
torch.library.define("dagrl::heads_backward", f"(Tensor queries, Tensor keys, Tensor values, {_INPUTS}) -> (Tensor, Tensor)")


@torch.library.register_fake("dagrl::heads")  # type: ignore[untyped-decorator]
def _empty_heads(mixed: Tensor, norm: Tensor, _: Any, cos: Any, sin: Any, eps: float, ratio: int) -> tuple[Tensor, Tensor]:
    size = len(norm)
    groups = mixed.shape[-1] // size // (ratio + 2)
    return mixed.new_empty(*mixed.shape[:-1], groups * ratio, size), mixed.new_empty(*mixed.shape[:-1], groups, size)


@torch.library.impl("dagrl::heads", ("cuda", "cpu"))
def _split(*inputs: Any) -> tuple[Tensor, Tensor]:
    heads: tuple[Tensor, Tensor] = _empty_heads(*inputs)
    write_heads(_grouped(*inputs), heads, inputs[5])
    return heads


@torch.library.register_fake("dagrl::heads_backward")  # type: ignore[untyped-decorator]
def _empty_gradients(queries: Any, keys: Any, values: Any, mixed: Tensor, norm: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return mixed.new_empty(mixed.shape), norm.new_empty(2, len(norm), dtype=torch.float32)


@torch.library.impl("dagrl::heads_backward", ("cuda", "cpu"))
def _join(queries: Tensor, keys: Tensor, values: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    grad, of_norms = heads_gradients(_grouped(*inputs), (queries, keys, values), inputs[5])
    return grad.view(inputs[0].shape), of_norms


def _grouped(mixed: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    query_norm, key_norm, cos, sin, _, ratio = inputs
    tables = (one.contiguous().flatten(0, -2) for one in (cos, sin))  # [rows, d]
    return mixed.view(*mixed.shape[:-1], -1, (ratio + 2) * len(query_norm)), query_norm, key_norm, *tables
