"""Log-probabilities and entropy of tokens, from the last hidden states and an output layer whose vocabulary is cut over
tensor-parallel workers.

The output layer is part of it: logits are made a chunk of tokens at a time, in float32, and made again in the backward pass,
so that neither the logits of a microbatch nor their gradient ever exist whole. Two collectives a call. The same is known
as a fused linear cross-entropy (Hsu et al. 2024, "Liger Kernel", arXiv:2410.10989, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 27  # logits that exist at a time, unless `chunk_tokens` says how many tokens' logits do


@dataclass(frozen=True)
class VocabularyPart:
    """Which tokens this worker's logits are for: `first` and the `size` after it; rows beyond are padding.

    `group` is the tensor-parallel group, or None when the vocabulary is whole.
    """

    first: int
    size: int
    group: Any = None


@dataclass(frozen=True)
class OutputLayer:
    """This worker's rows of the output layer, `weight` [rows, hidden size], and what its logits are made to be.

    Tokens are drawn from softmax(logits / temperature). `chunk_tokens`: how many tokens' logits exist at a time.
    """

    weight: Tensor
    part: VocabularyPart
    temperature: float = 1.0
    chunk_tokens: int | None = None

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Slices of the tokens; none when every row of this worker is padding."""
        step = self.chunk_tokens or max(1, CHUNK_ELEMENTS // max(1, self.part.size))
        return (slice(start, start + step) for start in range(0, tokens if self.part.size else 0, step))

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Float32 logits, divided by the temperature, of `hidden` [n, hidden size] -> [n, part.size]."""
        logits = _product(hidden, weight[: self.part.size].T)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def columns(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each label (0 where another worker has it), and whether it is here."""
        column = labels - self.part.first
        inside = (column >= 0) & (column < self.part.size)
        return torch.where(inside, column, 0), inside


def token_logprobs(hidden: Tensor, labels: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
    """Log-probability of each label, and the entropy (without gradient) of the distribution it came from.

    `hidden` [..., hidden size], `labels` [...] -> two float32 tensors [...]. Gradients reach `hidden` (this worker's part of
    the sum over the vocabulary) and `layer.weight`.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    logprobs, entropy = _TokenLogprobs.apply(flat, layer.weight, labels.reshape(-1), layer)  # type: ignore[no-untyped-call]
    return logprobs.view(labels.shape), entropy.view(labels.shape)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
        highest = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
        sums = highest.new_zeros(3, len(hidden))
        for rows in layer.chunks(len(hidden)):
            highest[rows], sums[:, rows] = _chunk_sums(layer.logits(hidden[rows], weight), labels[rows], layer)
        total, weighted, label_logit = _over_vocabulary(highest, sums, layer.part)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, labels, highest + log_total)
        ctx.layer = layer
        ctx.mark_non_differentiable(entropy)
        return label_logit - highest - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, labels, normaliser = ctx.saved_tensors
        layer: OutputLayer = ctx.layer
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        held = slice(layer.part.size)
        for rows in layer.chunks(len(hidden)):
            logits, scale = layer.logits(hidden[rows], weight), grads[0][rows] / layer.temperature
            grad = _logit_gradients(logits, normaliser[rows], scale, layer.columns(labels[rows]), hidden.dtype)
            grad_hidden[rows] = grad @ weight[held]
            grad_weight[held] += _product(grad.T, hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _chunk_sums(logits: Tensor, labels: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
    """The highest logit of each token [n], and three sums [3, n]; overwrites `logits` [n, part.size].

    Of the exponentials of the logits less the highest; of the products of both; and of the label's own logit.
    """
    column, inside = layer.columns(labels)
    if logits.is_cuda:
        from workers.megatron.logprob_kernels import chunk_sums

        return chunk_sums(logits, column, inside)
    label_logit = torch.where(inside, logits.gather(-1, column[:, None]).squeeze(-1), 0.0)
    highest = logits.amax(-1)
    relative = logits.sub_(highest[:, None])
    exponentials = relative.exp()
    return highest, torch.stack((exponentials.sum(-1), torch.linalg.vecdot(exponentials, relative), label_logit))


def _logit_gradients(
    logits: Tensor, normaliser: Tensor, scale: Tensor, labels: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """`scale` [n] times the gradient of the labels' log-probabilities, [n, part.size] in `dtype`; overwrites `logits`."""
    column, inside = labels
    if logits.is_cuda:
        from workers.megatron.logprob_kernels import logit_gradients

        return logit_gradients(logits, normaliser, scale, column, inside, dtype)
    grad = logits.sub_(normaliser[:, None]).exp_().mul_(-scale[:, None])
    return grad.scatter_add_(-1, column[:, None], (scale * inside)[:, None]).to(dtype)


def _over_vocabulary(highest: Tensor, sums: Tensor, part: VocabularyPart) -> Tensor:
    """The sums over all tensor-parallel workers, relative to the highest logit of all, which `highest` becomes."""
    if part.group is None:
        return sums
    own = highest.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=part.group)
    shift = own - highest if part.size else torch.zeros_like(highest)
    total, weighted, label_logit = sums
    factor = shift.exp()
    sums = torch.stack((total * factor, (weighted + total * shift) * factor, label_logit))
    dist.all_reduce(sums, group=part.group)
    return sums


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The matrix product in float32; on a GPU without rounding what half precision's products add up to."""
    if left.is_cuda and left.dtype is not torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()
