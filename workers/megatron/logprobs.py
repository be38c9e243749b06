"""Log-probabilities and entropy of tokens from logits whose vocabulary is cut over tensor-parallel workers.

Works in chunks of tokens, so that float32 copies of the logits never exist whole, and recomputes the softmax in the
backward pass; two collectives a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # logits turned to float32 at a time


@dataclass(frozen=True)
class VocabularyPart:
    """Which tokens this worker's logits are for: `first` and the `size` after it; columns beyond are padding.

    `group` is the tensor-parallel group, or None when the vocabulary is whole.
    """

    first: int
    size: int
    group: Any = None


def token_logprobs(logits: Tensor, labels: Tensor, part: VocabularyPart, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each label, and the entropy (without gradient) of the distribution it came from.

    `logits` [..., columns], `labels` [...] -> two float32 tensors [...]. The distribution is softmax(logits / temperature).
    """
    flat = logits.reshape(-1, logits.shape[-1])
    logprobs, entropy = _TokenLogprobs.apply(flat, labels.reshape(-1), part, temperature)  # type: ignore[no-untyped-call]
    return logprobs.view(labels.shape), entropy.view(labels.shape)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, part: VocabularyPart, temperature: float) -> tuple[Tensor, Tensor]:
        highest = logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)
        for rows in _chunks(logits, part):
            highest[rows] = _scaled(logits, rows, part, temperature).amax(-1)
        _all_reduce(highest, part, dist.ReduceOp.MAX)
        sums = torch.zeros(3, len(logits), device=logits.device)  # of exponentials, of the label's logit, of their products
        total, label_logit, weighted = sums
        for rows in _chunks(logits, part):
            relative = _scaled(logits, rows, part, temperature) - highest[rows, None]
            exponentials = relative.exp()
            total[rows] = exponentials.sum(-1)
            weighted[rows] = (exponentials * relative).sum(-1)
            column, inside = _local_label(labels[rows], part)
            label_logit[rows] = relative.gather(-1, column[:, None]).squeeze(-1) * inside
        _all_reduce(sums, part, dist.ReduceOp.SUM)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, labels, highest + log_total)
        ctx.part, ctx.temperature = part, temperature
        ctx.mark_non_differentiable(entropy)
        return label_logit - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, normaliser = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)
        for rows in _chunks(logits, ctx.part):
            scale = grads[0][rows] / ctx.temperature
            grad = (_scaled(logits, rows, ctx.part, ctx.temperature) - normaliser[rows, None]).exp_().mul_(-scale[:, None])
            column, inside = _local_label(labels[rows], ctx.part)
            grad.scatter_add_(-1, column[:, None], (scale * inside)[:, None])
            grad_logits[rows, : ctx.part.size] = grad.to(logits.dtype)
        return grad_logits, None, None, None


def _chunks(logits: Tensor, part: VocabularyPart) -> Iterator[slice]:
    """Slices of rows; none when every column of this worker is padding."""
    step = max(1, CHUNK_ELEMENTS // max(1, part.size))
    return (slice(start, start + step) for start in range(0, len(logits) if part.size else 0, step))


def _scaled(logits: Tensor, rows: slice, part: VocabularyPart, temperature: float) -> Tensor:
    return logits[rows, : part.size].float() / temperature


def _local_label(labels: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Column of each label (0 where another worker has it), and whether it is here."""
    column = labels - part.first
    inside = (column >= 0) & (column < part.size)
    return torch.where(inside, column, 0), inside


def _all_reduce(tensor: Tensor, part: VocabularyPart, operation: Any) -> None:
    if part.group is not None:
        dist.all_reduce(tensor, op=operation, group=part.group)
