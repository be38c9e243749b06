"""The experts of a layer as grouped matrix products: one launch for all experts instead of one each.

Parameters, names and checkpoints are those of Megatron's `SequentialMLP`, with one weight per expert. Megatron's own grouped
experts need Transformer Engine or the `grouped_gemm` extension. torch's `grouped_mm` needs all weights in one tensor, but
Megatron's buffers interleave fc1 and fc2 of the experts, last expert first. So each product copies its weights in one pass
and drops the copy.

In bfloat16 on Hopper and Blackwell a product is one kernel; elsewhere torch loops over the experts. Rows must be a multiple
of 16 bytes (`architecture.EXPERT_MULTIPLE`). Imported only where Megatron is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn.functional import grouped_mm


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Megatron's `SequentialMLP`, computed for all experts of this worker at once.

    The token dispatcher handles sharded experts (etp) and experts on other workers (ep): tokens that arrive here are
    multiplied by the local weights without a collective. The experts' linear layers are never called, so their hooks, such
    as Megatron's overlapped parameter gathering, do not run.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert not self.config.add_bias_linear, "grouped products support no bias"

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Returns outputs [tokens, hidden size] and no bias, for `hidden` [tokens, hidden size] sorted by expert.

        `tokens_per_expert` [experts] is int64, on the host if the dispatcher copied it there. `probs` [tokens] are the
        router's weights.
        """
        if self.config.moe_apply_probs_on_input:
            hidden, probs = (probs.unsqueeze(-1) * hidden).to(hidden.dtype), torch.ones_like(probs)
        groups = RowGroups.of(tokens_per_expert, hidden)
        layers = [(expert.linear_fc1.weight, expert.linear_fc2.weight) for expert in self.local_experts]
        first, second = (_linear(weights, groups) for weights in zip(*layers, strict=True))
        output, _ = MLP.forward(_MlpModule(self.config, self.local_experts[0].activation_func, first, second), hidden, probs)
        return output, None


class _MlpModule(NamedTuple):
    """The attributes that `MLP.forward` reads, so that Megatron computes activation and probabilities."""

    config: Any
    activation_func: Callable[[Tensor], Tensor]
    linear_fc1: Callable[[Tensor], tuple[Tensor, None]]
    linear_fc2: Callable[[Tensor], tuple[Tensor, None]]


@dataclass(frozen=True)
class RowGroups:
    """Which rows belong to which expert, in a tensor whose rows are sorted by expert.

    `experts` lists the experts with rows. Their rows end at `offsets` [len(experts)], int32 on the rows' device. Experts
    without rows are left out of products, because on some GPUs they would get non-zero gradients
    (https://github.com/pytorch/pytorch/issues/172439).
    """

    experts: tuple[int, ...]
    offsets: Tensor

    @classmethod
    def of(cls, tokens_per_expert: Tensor, rows: Tensor) -> RowGroups:
        """Builds the groups from counts on the host, without waiting for the device. Counts must sum to the rows."""
        counts: list[int] = tokens_per_expert.tolist()
        assert sum(counts) == len(rows), f"{len(rows)} rows for experts with {counts}"
        experts = tuple(expert for expert, count in enumerate(counts) if count)
        offsets = torch.tensor([counts[expert] for expert in experts]).cumsum(0, dtype=torch.int32)
        return cls(experts, offsets.to(rows.device, non_blocking=True))

    def stack(self, weights: Sequence[Tensor]) -> Tensor:
        """Stacks the weights of experts with rows to [len(experts), outputs, inputs]."""
        return torch.stack([weights[expert] for expert in self.experts])


def _linear(weights: Sequence[Tensor], groups: RowGroups) -> Callable[[Tensor], tuple[Tensor, None]]:
    return lambda rows: (expert_products(rows, groups, weights), None)


def expert_products(rows: Tensor, groups: RowGroups, weights: Sequence[Tensor]) -> Tensor:
    """Multiplies each row of `rows` [tokens, inputs] by its expert's weight [outputs, inputs] -> [tokens, outputs]."""
    products: Tensor = _ExpertProducts.apply(rows, groups, *weights)  # type: ignore[no-untyped-call]
    return products


class _ExpertProducts(torch.autograd.Function):
    """Saves the original weights, so that a layer keeps no second copy until its backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, groups: RowGroups, *weights: Tensor) -> Tensor:
        ctx.groups, rows = groups, rows.contiguous()
        ctx.save_for_backward(rows, *weights)
        if not groups.experts:
            return rows.new_empty(0, len(weights[0]))
        return grouped_mm(rows, groups.stack(weights).transpose(1, 2), offs=groups.offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_rows = _row_gradients(gradient, rows, ctx.groups, weights) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return of_rows, None, *(None for _ in weights)
        return of_rows, None, *_weight_gradients(gradient, rows, ctx.groups, weights)


def _row_gradients(gradient: Tensor, rows: Tensor, groups: RowGroups, weights: Sequence[Tensor]) -> Tensor:
    if not groups.experts:
        return torch.zeros_like(rows)
    return grouped_mm(gradient, groups.stack(weights), offs=groups.offsets)


def _weight_gradients(gradient: Tensor, rows: Tensor, groups: RowGroups, weights: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields a gradient for each weight: views of one tensor, and zeros for experts without rows."""
    made: dict[int, Tensor] = {}
    if groups.experts:
        # Left column-major, right row-major: no other layout supports any number of rows per expert.
        parts = grouped_mm(gradient.t(), rows, offs=groups.offsets).unbind()
        made.update(zip(groups.experts, parts, strict=True))
    return (made[expert] if expert in made else torch.zeros_like(weight) for expert, weight in enumerate(weights))
