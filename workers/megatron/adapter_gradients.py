"""Gradients of adapters without the gradient of the weight that they are added to.

A layer computes with the merged weight `W + scale * B @ A`, so its output is that of the merged refit, bit by bit. The
gradient of the whole weight would be a product as large as the forward pass, for nothing: with the layer's input x and the
gradient g of its output, those of the adapters are `scale * g^T (x A^T)` and `scale * (g B)^T x`. Imported only where
Megatron is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, linear_with_frozen_weight
from torch import Tensor

Factors = Callable[[], tuple[Tensor, Tensor] | None]
"""Returns B [outputs, dim] and A [dim, inputs] of the running pass; None if the layer runs without adapters."""


def is_linear(module: torch.nn.Module) -> bool:
    """Whether `leave_weight_out` knows the layer."""
    return isinstance(module, ColumnParallelLinear | RowParallelLinear)


def leave_weight_out(module: torch.nn.Module, factors: Factors, scale: float) -> None:
    """Makes a linear layer, whose weight is frozen or merged without a gradient, give `factors` their gradients."""

    def forward(input: Tensor, weight: Tensor, **options: Any) -> Tensor:  # Megatron's names
        output: Tensor = linear_with_frozen_weight(input, weight, **options)
        found = factors() if torch.is_grad_enabled() else None
        if found is None:
            return output
        group = options["tp_group"] if options["sequence_parallel"] else None
        result: Tensor = _AdapterGradients.apply(output, input, *found, scale, group)  # type: ignore[no-untyped-call]
        return result

    module.__dict__["_forward_impl"] = forward


class _AdapterGradients(torch.autograd.Function):
    """Passes the output on. With a `group` the input is this rank's part of the sequence, and the output has all of it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor, wide: Tensor, narrow: Tensor, scale: float, group: Any) -> Tensor:
        ctx.save_for_backward(inputs, wide, narrow)
        ctx.scale, ctx.group = scale, group
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, wide, narrow = ctx.saved_tensors
        gradient, rows = gradients[0].flatten(0, -2), inputs.flatten(0, -2)
        hidden = rows @ narrow.t()  # [tokens, dim]
        of_hidden = gradient @ wide
        if ctx.group is not None:
            whole, part = torch.empty_like(of_hidden), torch.empty_like(hidden)
            dist.all_gather_into_tensor(whole, hidden, group=ctx.group)
            dist.reduce_scatter_tensor(part, of_hidden, group=ctx.group)
            hidden, of_hidden = whole, part
        of_wide, of_narrow = gradient.t() @ hidden, of_hidden.t() @ rows
        return gradients[0], None, ctx.scale * of_wide, ctx.scale * of_narrow, None, None
