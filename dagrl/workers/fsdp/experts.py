"""`grouped_permuted`: experts of transformers' models by grouped products of matrices (`torch._grouped_mm`).

As transformers' default `grouped_mm`, but the gradient of sorting tokens by expert is a gather, too, where an index would
sort again and add up rows. Imported only where torch is.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, _grouped_linear, grouped_mm_experts_forward

GROUPED_PERMUTED = "grouped_permuted"
SCALE = "_adapter_scale"
"""Attribute of a module of experts with adapters: what multiplies B @ A. 0: the base model."""


def factor_names(parameter: str) -> tuple[str, str]:
    """Returns the names of the adapters of a parameter: A [experts, dim, inputs] and B [experts, outputs, dim]."""
    return f"lora_{parameter}_A", f"lora_{parameter}_B"


def expert_weights(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """Returns the weights of experts that `run_experts` multiplies: the module and its name there, by the whole name."""
    return {
        f"{name}.{own}": (part, own)
        for name, part in model.named_modules()
        if hasattr(part, "is_transposed") and part.config._experts_implementation == GROUPED_PERMUTED
        for own, weight in part.named_parameters(recurse=False)
        if weight.ndim == 3 and not own.startswith("lora_")
    }


class _ToExperts(torch.autograd.Function):
    """Returns the row of a token for each expert that it visits, in the order of the experts: [t, h] -> [t * k, h]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, places: Tensor, chosen: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.chosen = chosen
        return hidden[order // chosen]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grads[0][places].view(-1, ctx.chosen, grads[0].shape[-1]).sum(1), None, None, None


class _FromExperts(torch.autograd.Function):
    """Returns rows in the order of the tokens: [t * k, h] -> [t * k, h]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[places]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grads[0][order], None, None


def run_experts(self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`hidden` [t, h], the experts of each token [t, k] and their weights [t, k] -> [t, h]. `self`: the experts' module."""
    if self._is_expert_parallel:
        return grouped_mm_experts_forward(self, hidden, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    experts, order = torch.sort(top_k_index.reshape(-1))
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = torch.searchsorted(experts, torch.arange(self.num_experts, device=experts.device), right=True).int()
    rows = _ToExperts.apply(hidden, order, places, top_k_index.shape[-1])  # type: ignore[no-untyped-call]
    name = "gate_up_proj" if self.has_gate else "up_proj"
    rows = _linear(self, name, rows, experts, ends)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _linear(self, "down_proj", rows, experts, ends)
    rows = _FromExperts.apply(rows, order, places).view(*top_k_index.shape, -1)  # type: ignore[no-untyped-call]
    mixed: Tensor = (rows * top_k_weights[..., None]).sum(1)
    return mixed.to(hidden.dtype)


def _linear(self: Any, name: str, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
    bias = getattr(self, f"{name}_bias")[experts] if self.has_bias else None
    out: Tensor = _grouped_linear(rows, getattr(self, name), ends, bias=bias, is_transposed=self.is_transposed)
    a, b = factor_names(name)
    if getattr(self, SCALE, 0.0) and hasattr(self, a):
        for factor in (a, b):
            rows = _grouped_linear(rows, getattr(self, factor), ends)
        out = out.add(rows, alpha=getattr(self, SCALE))
    return out


ExpertsInterface.register(GROUPED_PERMUTED, run_experts)


def use_permutations(model: nn.Module) -> None:
    """Gives a model's experts this implementation where they have transformers' `grouped_mm`."""
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "_experts_implementation_internal", None) == "grouped_mm":
            config._experts_implementation_internal = GROUPED_PERMUTED
