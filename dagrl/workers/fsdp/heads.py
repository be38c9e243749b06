"""Attention of transformers' models in the form of Qwen3's, with fewer products and passes over memory.

One product computes queries, keys and values, whose weights are rows of one matrix among `ComputeCopies`, and one kernel
normalizes and rotates them. Modules are known by their code, which transformers copies from model to model; others stay as
they are. Imported only where Triton is.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from dagrl.workers.fsdp.copies import JOINT
from dagrl.workers.megatron.triton_kernels import HEAD_PROGRAMS, run_heads


def fuse_attention(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives known modules another forward pass, if their weights are trained with copies in another `dtype`."""
    rotary = [part for part in model.modules() if hasattr(part, "inv_freq")]
    rotates = all(_same(type(part).forward, qwen3.Qwen3RotaryEmbedding.forward) for part in rotary)
    for module in model.modules():
        kind: Any = type(module)
        if rotates and _is_attention(module) and all(_is_plain(getattr(module, name), dtype) for name in _Attention.joined):
            module.__class__ = _fused(kind)


def _is_attention(module: Any) -> bool:
    forward = type(module).forward
    if not _same(forward, qwen3.Qwen3Attention.forward):
        return False
    norms = all(_same(type(norm).forward, qwen3.Qwen3RMSNorm.forward) for norm in (module.q_norm, module.k_norm))
    parts = "apply_rotary_pos_emb", "rotate_half", "eager_attention_forward"
    return norms and all(_same(forward.__globals__.get(name), getattr(qwen3, name)) for name in parts)


def _is_plain(part: Any, dtype: torch.dtype) -> bool:
    plain = type(part) is nn.Linear and getattr(part, "bias", None) is None  # no adapters
    return plain and part.weight.requires_grad and part.weight.dtype is not dtype


def _same(function: Any, other: Any) -> bool:
    codes = [getattr(inspect.unwrap(one), "__code__", None) for one in (function, other)]
    found, expected = ((code.co_code, code.co_names, code.co_varnames, code.co_consts) if code else None for code in codes)
    return found == expected


@cache
def _fused(kind: Any) -> Any:
    return type(kind.__name__, (_Attention, kind), {"__module__": kind.__module__})


class _Attention(nn.Module):
    joined = ("q_proj", "k_proj", "v_proj")

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any = None,
        **given: Any,
    ) -> Any:
        (cos, sin), joint = position_embeddings, self._parameters.get(JOINT)
        if joint is None or past_key_values is not None or cos.shape[-1] != self.head_dim:
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **given)
        norms, sizes = (self.q_norm.weight, self.k_norm.weight), (self.q_norm.variance_epsilon, self.num_key_value_groups)
        heads = _Heads.apply(linear(hidden_states, joint), *norms, cos, sin, *sizes)  # type: ignore[no-untyped-call]
        implementation, plain = self.config._attn_implementation, qwen3.eager_attention_forward
        attend = qwen3.ALL_ATTENTION_FUNCTIONS.get_interface(implementation, plain)
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
        grad, norms = torch.ops.dagrl.heads_backward.default(*grads, *ctx.saved_tensors, *ctx.sizes)
        of_queries, of_keys = norms.to(ctx.saved_tensors[1].dtype)
        return grad, of_queries, of_keys, None, None, None, None


_INPUTS = "Tensor mixed, Tensor query_norm, Tensor key_norm, Tensor cos, Tensor sin, float eps, int ratio"
torch.library.define("dagrl::heads", f"({_INPUTS}) -> (Tensor, Tensor)")
torch.library.define("dagrl::heads_backward", f"(Tensor queries, Tensor keys, Tensor values, {_INPUTS}) -> (Tensor, Tensor)")


@torch.library.register_fake("dagrl::heads")  # type: ignore[untyped-decorator]
def _empty_heads(mixed: Tensor, norm: Tensor, _: Any, cos: Any, sin: Any, eps: float, ratio: int) -> tuple[Tensor, ...]:
    size = len(norm)
    groups = mixed.shape[-1] // size // (ratio + 2)
    return tuple(mixed.new_empty(*mixed.shape[:-1], groups * count, size) for count in (ratio, 1))


@torch.library.impl("dagrl::heads", ("cuda", "cpu"))
def _split(mixed: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    queries, keys = _empty_heads(mixed, *inputs)
    _run((queries, keys, keys), mixed, *inputs, grad=mixed, parts=mixed, backward=False)
    return queries, keys


@torch.library.register_fake("dagrl::heads_backward")  # type: ignore[untyped-decorator]
def _empty_gradients(queries: Any, keys: Any, values: Any, mixed: Tensor, norm: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return mixed.new_empty(mixed.shape), norm.new_empty(2, len(norm), dtype=torch.float32)


@torch.library.impl("dagrl::heads_backward", ("cuda", "cpu"))
def _join(queries: Tensor, keys: Tensor, values: Tensor, mixed: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    grads = tuple(one if one.stride(3) == 1 else one.contiguous() for one in (queries, keys, values))
    grad, parts = torch.empty_like(mixed), mixed.new_empty(HEAD_PROGRAMS, 2, len(inputs[0]), dtype=torch.float32)
    _run(grads, mixed, *inputs, grad=grad, parts=parts, backward=True)
    return grad, parts.sum(0)


def _run(heads: tuple[Tensor, ...], mixed: Tensor, *inputs: Any, grad: Tensor, parts: Tensor, backward: bool) -> None:
    query_norm, key_norm, cos, sin, eps, ratio = inputs
    grouped = mixed.view(*mixed.shape[:-1], -1, (ratio + 2) * len(query_norm))
    tables = [one.contiguous().flatten(0, -2) for one in (cos, sin)]
    run_heads((grouped, query_norm, key_norm, tables[0]), heads, grad, parts, eps, backward=backward, sines=tables[1])
