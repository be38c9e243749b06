"""The experts of a layer as grouped matrix products: one launch for all of them, not one for each.

Parameters, their names and their checkpoints are those of Megatron's `SequentialMLP`, a weight for each expert; Megatron's
own grouped experts need Transformer Engine or the `grouped_gemm` extension. torch's `grouped_mm` takes all weights as one
tensor, and Megatron's buffers hold fc1 and fc2 of an expert side by side, the last expert first: each product copies the
weights that it needs, one pass over them, and drops the copy.

In bfloat16 on Hopper and Blackwell a product is one kernel; elsewhere torch goes from expert to expert. Rows must be whole
16 bytes (`architecture.EXPERT_MULTIPLE`). Imported only where Megatron is.
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

    Experts that are cut themselves (etp) and experts on other workers (ep) are the token dispatcher's matter: what arrives
    here is multiplied by the parts of weights that are here, without a collective. The experts' own linear layers are never
    called, so what hooks on them would do (Megatron's overlapped gathering of parameters) does not happen.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert not self.config.add_bias_linear, "grouped products add no bias"

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Outputs [tokens, hidden size], and no bias, of `hidden` [tokens, hidden size], sorted by expert.

        `tokens_per_expert` [experts] is int64, on the host where the dispatcher copied it there; `probs` [tokens] are what
        the router gave each token's expert.
        """
        if self.config.moe_apply_probs_on_input:
            hidden, probs = (probs.unsqueeze(-1) * hidden).to(hidden.dtype), torch.ones_like(probs)
        groups = RowGroups.of(tokens_per_expert, hidden)
        layers = [(expert.linear_fc1.weight, expert.linear_fc2.weight) for expert in self.local_experts]
        first, second = (_linear(weights, groups) for weights in zip(*layers, strict=True))
        output, _ = MLP.forward(_MlpParts(self.config, self.local_experts[0].activation_func, first, second), hidden, probs)
        return output, None


class _MlpParts(NamedTuple):
    """What `MLP.forward` asks of its module: activation and probabilities stay as Megatron computes them."""

    config: Any
    activation_func: Callable[[Tensor], Tensor]
    linear_fc1: Callable[[Tensor], tuple[Tensor, None]]
    linear_fc2: Callable[[Tensor], tuple[Tensor, None]]


@dataclass(frozen=True)
class RowGroups:
    """Which rows belong to which expert, in a tensor whose rows are sorted by expert.

    `experts` are those that have rows; theirs end at `offsets` [len(experts)], int32 on the device of the rows. Experts
    without rows are left out of products: on some GPUs they would get gradients that are not zero
    (https://github.com/pytorch/pytorch/issues/172439).
    """

    experts: tuple[int, ...]
    offsets: Tensor

    @classmethod
    def of(cls, tokens_per_expert: Tensor, rows: Tensor) -> RowGroups:
        """Made of counts on the host, without waiting for the device of `rows`, all of which they must count."""
        counts: list[int] = tokens_per_expert.tolist()
        assert sum(counts) == len(rows), f"{len(rows)} rows, of which experts were to get {counts}"
        experts = tuple(expert for expert, count in enumerate(counts) if count)
        offsets = torch.tensor([counts[expert] for expert in experts]).cumsum(0, dtype=torch.int32)
        return cls(experts, offsets.to(rows.device, non_blocking=True))

    def stack(self, weights: Sequence[Tensor]) -> Tensor:
        """Weights of the experts that have rows, [len(experts), outputs, inputs]."""
        return torch.stack([weights[expert] for expert in self.experts])


def _linear(weights: Sequence[Tensor], groups: RowGroups) -> Callable[[Tensor], tuple[Tensor, None]]:
    return lambda rows: (expert_products(rows, groups, weights), None)


def expert_products(rows: Tensor, groups: RowGroups, weights: Sequence[Tensor]) -> Tensor:
    """Each row of `rows` [tokens, inputs] times the weight [outputs, inputs] of its expert; [tokens, outputs]."""
    products: Tensor = _ExpertProducts.apply(rows, groups, *weights)  # type: ignore[no-untyped-call]
    return products


class _ExpertProducts(torch.autograd.Function):
    """Saves the weights as they are, so that a layer keeps no second copy of them until its backward pass."""

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
    """A gradient for each weight: parts of one tensor, and zeros for experts without rows."""
    made: dict[int, Tensor] = {}
    if groups.experts:
        # The left one column after column, the right one row after row: no other order takes any number of rows an expert.
        parts = grouped_mm(gradient.t(), rows, offs=groups.offsets).unbind()
        made.update(zip(groups.experts, parts, strict=True))
    return (made[expert] if expert in made else torch.zeros_like(weight) for expert, weight in enumerate(weights))
