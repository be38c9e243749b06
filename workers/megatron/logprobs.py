"""Log-probabilities and entropy of tokens from the last hidden states, with a vocabulary-parallel output layer.

The output layer is fused in: logits are computed in float32 for a chunk of tokens at a time, and again in the backward pass,
so neither a microbatch's logits nor their gradient exist as a whole. Two collectives per call. This is known as fused linear
cross-entropy (Hsu et al. 2024, "Liger Kernel", arXiv:2410.10989, section 3.2).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

CHUNK_ELEMENTS = 1 << 27  # logits of a chunk, unless `chunk_tokens` is set


@dataclass(frozen=True)
class VocabularyShard:
    """The token ids of this worker's logits: `size` ids from `first` on. Further rows are padding.

    `group` is the tensor-parallel group, or None if the vocabulary is not sharded.
    """

    first: int
    size: int
    group: Any = None


@dataclass(frozen=True)
class OutputLayer:
    """This worker's rows of the output layer, `weight` [rows, hidden size], and its sampling temperature.

    Tokens are sampled from softmax(logits / temperature). `chunk_tokens`: tokens whose logits exist at a time.
    """

    weight: Tensor
    shard: VocabularyShard
    temperature: float = 1.0
    chunk_tokens: int | None = None

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Yields slices of the tokens; none if all rows of this worker are padding."""
        step = self.chunk_tokens or max(1, CHUNK_ELEMENTS // max(1, self.shard.size))
        return (slice(start, start + step) for start in range(0, tokens if self.shard.size else 0, step))

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Returns float32 logits [n, shard.size] of `hidden` [n, hidden size], divided by the temperature."""
        logits = _product(hidden, weight[: self.shard.size].T)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def columns(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the column of each label (0 if another worker has it), and whether this worker has it."""
        column = labels - self.shard.first
        inside = (column >= 0) & (column < self.shard.size)
        return torch.where(inside, column, 0), inside


def token_logprobs(hidden: Tensor, labels: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each label and the entropy (without gradient) of its distribution.

    `hidden` [..., hidden size], `labels` [...] -> two float32 tensors [...]. Gradients reach `hidden` (this worker's share
    of the sum over the vocabulary) and `layer.weight`.
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
        total, weighted, label_logit = _over_vocabulary(highest, sums, layer.shard)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, labels, highest + log_total)
        ctx.layer = layer
        ctx.mark_non_differentiable(entropy)
        return label_logit - highest - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, labels, normaliser = ctx.saved_tensors
        layer: OutputLayer = ctx.layer
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        held = slice(layer.shard.size)
        for rows in layer.chunks(len(hidden)):
            logits, scale = layer.logits(hidden[rows], weight), grads[0][rows] / layer.temperature
            grad = _logit_gradients(logits, normaliser[rows], scale, layer.columns(labels[rows]), hidden.dtype)
            grad_hidden[rows] = grad @ weight[held]
            if grad_weight is not None:
                _add_product(grad_weight[held], grad.T, hidden[rows])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _chunk_sums(logits: Tensor, labels: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
    """Returns the highest logit of each token [n] and three sums [3, n]. Overwrites `logits` [n, shard.size].

    The sums are of exp(logit - highest), of exp(logit - highest) * (logit - highest), and of the label's own logit.
    """
    column, inside = layer.columns(labels)
    if logits.is_cuda:
        from dagrl.workers.megatron.logprob_kernels import chunk_sums

        return chunk_sums(logits, column, inside)
    label_logit = torch.where(inside, logits.gather(-1, column[:, None]).squeeze(-1), 0.0)
    highest = logits.amax(-1)
    relative = logits.sub_(highest[:, None])
    exponentials = relative.exp()
    return highest, torch.stack((exponentials.sum(-1), torch.linalg.vecdot(exponentials, relative), label_logit))


def _logit_gradients(
    logits: Tensor, normaliser: Tensor, scale: Tensor, labels: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """Returns `scale` [n] times the log-probabilities' gradient, [n, shard.size] in `dtype`. Overwrites `logits`."""
    column, inside = labels
    if logits.is_cuda:
        from dagrl.workers.megatron.logprob_kernels import logit_gradients

        return logit_gradients(logits, normaliser, scale, column, inside, dtype)
    grad = logits.sub_(normaliser[:, None]).exp_().mul_(-scale[:, None])
    return grad.scatter_add_(-1, column[:, None], (scale * inside)[:, None]).to(dtype)


def _over_vocabulary(highest: Tensor, sums: Tensor, shard: VocabularyShard) -> Tensor:
    """Sums over all tensor-parallel workers, relative to the global highest logit, which is written to `highest`."""
    if shard.group is None:
        return sums
    own = highest.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shard.group)
    shift = own - highest if shard.size else torch.zeros_like(highest)
    total, weighted, label_logit = sums
    factor = shift.exp()
    sums = torch.stack((total * factor, (weighted + total * shift) * factor, label_logit))
    dist.all_reduce(sums, group=shard.group)
    return sums


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Returns the matrix product in float32. On a GPU half-precision products are accumulated without rounding."""
    if left.is_cuda and left.dtype is not torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the matrix product to float32 `total`, within the product's kernel if torch can."""
    if left.is_cuda and left.dtype is not torch.float32 and _adds_products(left.device, left.dtype):
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    else:
        total += _product(left, right)


@cache
def _adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a half-precision product to a float32 matrix."""
    total, one = torch.ones(8, 8, device=device), torch.eye(8, device=device, dtype=dtype)
    try:
        torch.ops.aten.addmm.dtype_out(total, one, one, torch.float32, out=total)
    except RuntimeError as error:  # also raised for arguments that an operator does not support
        logger.info("products are added apart, torch's own cannot: %s", error)
        return False
    return bool((total == 1 + one).all())
