"""The adapters of one local weight as one product, and their gradients without that of the weight.

A layer computes with the merged weight `W + scale * B @ A`, so its output is that of the merged refit, bit by bit. The
gradient of the whole weight would be a product as large as the forward pass, for nothing: with the layer's input x and the
gradient g of its output, those of the adapters are `scale * g^T (x A^T)` and `scale * (g B)^T x`. Imported only where
Megatron is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, linear_with_frozen_weight
from torch import Tensor

Adapter = tuple[torch.nn.Parameter, torch.nn.Parameter]
"""A [dim, inputs] and B [outputs, dim] of one Hugging Face parameter."""

Factors = tuple[Tensor, Tensor]
"""All B and all A as one product: [rows, adapters * dim] and [adapters * dim, columns]."""


@dataclass(frozen=True)
class AdapterStack:
    """The adapters of one local weight, computed together.

    A fused query, key and value weight has a part per head group, and a product for each would take longer to launch than to
    compute. With the rows of all B under each other: row `sources[i]` of them belongs at `places[i]`, which is
    `row * adapters + adapter`. `whole`: one adapter has all rows, in order. `columns`: those of A that the weight has.
    """

    adapters: Sequence[Adapter]
    rows: int
    sources: Tensor
    places: Tensor
    whole: bool
    columns: slice

    def factors(self) -> Factors:
        """Returns the factors, differentiable in the adapters."""
        wide = torch.cat([adapter[1] for adapter in self.adapters])
        if not self.whole:
            empty = wide.new_zeros(self.rows * len(self.adapters), wide.shape[1])
            wide = empty.index_copy(0, self.places, wide[self.sources]).view(self.rows, -1)
        return wide, torch.cat([adapter[0][:, self.columns] for adapter in self.adapters])

    def gradients(self, of_wide: Tensor, of_narrow: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of A and B of each adapter from those of the factors."""
        if not self.whole:
            taken = of_wide.reshape(self.rows * len(self.adapters), -1)[self.places]
            length = sum(len(adapter[1]) for adapter in self.adapters)
            of_wide = taken.new_zeros(length, taken.shape[1]).index_copy_(0, self.sources, taken)
        inputs = self.adapters[0][0].shape[1]
        if of_narrow.shape[1] < inputs:  # the other columns are those of other ranks
            of_narrow = torch.nn.functional.pad(of_narrow, (self.columns.start, inputs - self.columns.stop))
        of_a = torch.split(of_narrow, [len(adapter[0]) for adapter in self.adapters])
        of_b = torch.split(of_wide, [len(adapter[1]) for adapter in self.adapters])
        return tuple(part for pair in zip(of_a, of_b, strict=True) for part in pair)


Running = Callable[[], tuple[AdapterStack, Factors] | None]
"""Returns what the running pass merged, without gradients; None if the layer runs without adapters."""


def is_linear(module: torch.nn.Module) -> bool:
    """Whether `leave_weight_out` knows the layer."""
    return isinstance(module, ColumnParallelLinear | RowParallelLinear)


def leave_weight_out(module: torch.nn.Module, running: Running, scale: float) -> None:
    """Makes a linear layer, whose weight is frozen or merged without a gradient, give its adapters their gradients."""

    frozen = module.__dict__.get("_forward_impl", linear_with_frozen_weight)  # the former in FP8

    def forward(input: Tensor, weight: Tensor, **options: Any) -> Tensor:  # Megatron's names
        output: Tensor = frozen(input, weight, **options)
        found = running() if torch.is_grad_enabled() else None
        if found is None:
            return output
        stack, factors = found
        group = options["tp_group"] if options["sequence_parallel"] else None
        trained = [part for adapter in stack.adapters for part in adapter]
        result: Tensor = _AdapterGradients.apply(output, input, stack, *factors, scale, group, *trained)  # type: ignore[no-untyped-call]
        return result

    module.__dict__["_forward_impl"] = forward


class _AdapterGradients(torch.autograd.Function):
    """Passes the output on. With a `group` the input is this rank's part of the sequence, and the output has all of it."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        inputs: Tensor,
        stack: AdapterStack,
        wide: Tensor,
        narrow: Tensor,
        scale: float,
        group: Any,
        *trained: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(inputs, wide, narrow)
        ctx.stack, ctx.scale, ctx.group = stack, scale, group
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
        of_wide, of_narrow = gradient.t() @ hidden.mul_(ctx.scale), of_hidden.mul_(ctx.scale).t() @ rows
        return gradients[0], None, None, None, None, None, None, *ctx.stack.gradients(of_wide, of_narrow)
