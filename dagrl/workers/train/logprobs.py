"""Log-probabilities and entropy of tokens from the last hidden states, with a vocabulary-parallel output layer.

The output layer is fused in: logits are computed in float32 for a chunk of tokens at a time, and again in the backward pass,
so neither a microbatch's logits nor their gradient exist as a whole. Two collectives per call. This is known as fused linear
cross-entropy (Hsu et al. 2024, "Liger Kernel", arXiv:2410.10989, section 3.2).

On a GPU with memory to spare, exponentials of the logits are kept in half precision instead, and the backward pass turns
them into gradients in place. That saves one product of four, and the weight's gradient is summed over few large products.

A loss reads nothing outside its mask, so prompts and padding are not computed. The output layer
is a quarter of the arithmetic of a model with 0.6 B parameters. The host counts these tokens, so the device finds them
without a wait. Imported only where torch is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dagrl.runtime.shapes import Batch

logger = logging.getLogger(__name__)

CHUNK_ELEMENTS = 1 << 27  # logits of a chunk, unless `chunk_tokens` is set
KEPT_SHARE = 0.25  # most of the free memory that kept exponentials take
PRODUCT_ELEMENTS = (1 << 31) - 1  # most of a product's operand: kernels may count elements in 32 bits


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

    Tokens are sampled from softmax(logits / temperature). `chunk_tokens`: tokens whose logits exist at a time. `keeps`:
    whether exponentials are kept for the backward pass; None: on a GPU where they fit, unless `chunk_tokens` is set.
    `shared`: the weight is also the embedding's, which has a gradient of its own. `transform` is a differentiable function
    that the model applies to each logit, before the temperature: [1, n, rows] -> [1, n, rows].
    """

    weight: Tensor
    shard: VocabularyShard
    temperature: float = 1.0
    chunk_tokens: int | None = None
    keeps: bool | None = None
    shared: bool = False
    transform: Callable[[Tensor], Tensor] | None = None

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Yields slices of the tokens; none if all rows of this worker are padding."""
        step = self.chunk_tokens or max(1, CHUNK_ELEMENTS // max(1, self.shard.size))
        return (slice(start, start + step) for start in range(0, tokens if self.shard.size else 0, step))

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Returns float32 logits [n, shard.size] of `hidden` [n, hidden size], divided by the temperature."""
        logits = product(hidden, weight[: self.shard.size].T)
        logits = logits if self.transform is None else self.transform(logits[None])[0]
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def through_transform(self, grad: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        """Returns the gradient of the logits before `transform`, given that of the logits after it, [n, shard.size]."""
        if self.transform is None:
            return grad
        with torch.enable_grad():
            logits = product(hidden, weight[: self.shard.size].T).detach().requires_grad_()
            (before,) = torch.autograd.grad(self.transform(logits[None])[0], logits, grad.float())
        return before.to(grad.dtype)

    def keeps_for(self, hidden: Tensor) -> bool:
        """Whether a backward pass follows that finds the exponentials of `hidden` [n, hidden size] kept."""
        if not torch.is_grad_enabled() or not (hidden.requires_grad or self.weight.requires_grad):
            return False
        if self.transform is not None:
            return False
        if self.keeps is not None or self.chunk_tokens is not None or not hidden.is_cuda:
            return bool(self.keeps)
        cached = torch.cuda.memory_reserved(hidden.device) - torch.cuda.memory_allocated(hidden.device)
        free = torch.cuda.mem_get_info(hidden.device)[0] + cached
        return len(hidden) * self.shard.size * hidden.element_size() <= KEPT_SHARE * free

    def columns(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the column of each label (0 if another worker has it), and whether this worker has it."""
        column = labels - self.shard.first
        inside = (column >= 0) & (column < self.shard.size)
        return torch.where(inside, column, 0), inside


@dataclass(frozen=True)
class TokenHead:
    """A model's output layer. `prepare` takes outputs [..., hidden size] and returns the layer and its inputs."""

    prepare: Callable[[Tensor], tuple[Tensor, OutputLayer]]

    def __call__(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log-probability of each label, with gradients, and the entropy of its distribution, without.

        `labels` [...] or several for each output, [..., k], which take k times the work. Results are float32 like `labels`,
        of logits divided by the temperature.
        """
        inputs, layer = self.prepare(hidden)
        return token_logprobs(inputs, labels, layer)

    def top(self, hidden: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
        """Returns the `count` likeliest ids with their log-probabilities: pairs of [...], likeliest first, no gradients."""
        inputs, layer = self.prepare(hidden)
        ids, logprobs = top_tokens(inputs.reshape(-1, inputs.shape[-1]), count, layer)
        return [
            (ids[:, place].view(hidden.shape[:-1]), logprobs[:, place].view(hidden.shape[:-1])) for place in range(count)
        ]


@torch.no_grad()
def top_tokens(hidden: Tensor, count: int, layer: OutputLayer) -> tuple[Tensor, Tensor]:
    """Returns the `count` likeliest ids of `hidden` [n, hidden size] and their log-probabilities [n, count]."""
    best = hidden.new_full((len(hidden), count), -torch.inf, dtype=torch.float32)
    ids, total = (
        best.new_zeros(best.shape),
        best.new_full((len(hidden), 1), -torch.inf),
    )  # ids in float32, to gather them together
    own = min(count, layer.shard.size)
    for rows in layer.chunks(len(hidden)):
        logits = layer.logits(hidden[rows], layer.weight)
        best[rows, :own], places = logits.topk(own)
        ids[rows, :own] = (places + layer.shard.first).float()
        total[rows] = logits.logsumexp(-1, keepdim=True)
    if layer.shard.group is not None:
        size = dist.get_world_size(layer.shard.group)
        mine = torch.cat([best, ids, total], dim=1)
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine, group=layer.shard.group)
        every = torch.stack(parts, dim=1)  # [n, ranks, 2 count + 1]
        best, places = every[..., :count].flatten(1).topk(count)
        ids, total = every[..., count:-1].flatten(1).gather(1, places), every[..., -1].logsumexp(-1, keepdim=True)
    return ids.long(), best - total


def token_logprobs(hidden: Tensor, labels: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each label and the entropy (without gradient) of its distribution.

    `hidden` [..., hidden size], `labels` [...], or [..., k] for k of each -> two float32 tensors like `labels`. Gradients
    reach `hidden` (this worker's share of the sum over the vocabulary) and `layer.weight`.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    if labels.dim() == hidden.dim():
        flat = flat.repeat_interleave(labels.shape[-1], dim=0)
    inputs = flat, layer.weight, labels.reshape(-1), layer, layer.keeps_for(flat)
    logprobs, entropy = _TokenLogprobs.apply(*inputs)  # type: ignore[no-untyped-call]
    return logprobs.view(labels.shape), entropy.view(labels.shape)


def scored_tokens(masks: Sequence[Tensor], rows: Sequence[Collection[int]], batch: Batch) -> list[Tensor]:
    """Returns the scored tokens of each microbatch of `batch`, given its loss mask and its rows; row -1 is padding."""
    inside = np.arange(1, batch.tokens) < batch["lengths"][:, None]  # the first token is never predicted
    per_row = ((batch["loss_mask"][:, 1:] != 0) & inside).sum(1).tolist()
    counts = [sum(per_row[row] for row in indices if row >= 0) for indices in rows]
    scored: list[Tensor] = []
    for mask, count in zip(masks, counts, strict=True):  # `torch.nonzero` would wait for the device to know the count
        inside_mask = mask.flatten() != 0
        indices = torch.zeros(max(count, 1) + 1, dtype=torch.int64, device=mask.device)  # 0 if there is none
        places = torch.where(inside_mask, inside_mask.cumsum(0) - 1, len(indices) - 1)
        scored.append(indices.scatter_(0, places, torch.arange(mask.numel(), device=mask.device))[:-1])
    return scored


def scored_logprobs(hidden: Tensor, labels: Tensor, scored: Tensor | None, head: TokenHead) -> tuple[Tensor, Tensor]:
    """Returns `head` of `hidden` [b, s, hidden size] and `labels` [b, s] or [b, s, k], at `scored` and 0 elsewhere."""
    if scored is None:
        return head(hidden, labels)
    flat = labels.flatten(0, 1)
    values = head(hidden.flatten(0, 1).index_select(0, scored), flat.index_select(0, scored))
    logprobs, entropy = (value.new_zeros(flat.shape).index_copy(0, scored, value).view(labels.shape) for value in values)
    return logprobs, entropy


def masked_columns(data: Mapping[str, Tensor], scored: Tensor | None) -> dict[str, Tensor]:
    """Returns `data` with 0 outside the loss mask, in columns of numbers: ratios to the missing log-probabilities stay 1."""
    if scored is None:
        return dict(data)
    inside = data["loss_mask"] != 0
    return {
        name: torch.where(inside, column, 0.0) if column.is_floating_point() else column for name, column in data.items()
    }


@dataclass(frozen=True)
class Exponentials:
    """Exponentials of logits, relative to a number close to the highest of their row: exp(logit - top).

    `values` [n, shard.size] have the dtype of the hidden states; `tops` [n, tiles] are float32, one for each tile of columns
    that the kernel reads at a time. Without the kernel a row is one tile.
    """

    values: Tensor
    tops: Tensor

    @classmethod
    def of(cls, hidden: Tensor, columns: int) -> Exponentials:
        """Allocates memory for `hidden` [n, hidden size]."""
        tiles = 1
        if hidden.is_cuda:
            from dagrl.workers.train.logprob_kernels import TILE

            tiles = -(-columns // TILE)
        values = hidden.new_empty(len(hidden), columns)
        return cls(values, hidden.new_empty(len(hidden), tiles, dtype=torch.float32))

    def __getitem__(self, rows: slice) -> Exponentials:
        return Exponentials(self.values[rows], self.tops[rows])

    def parts(self) -> Iterator[slice]:
        """Yields slices of the tokens, as large as products take."""
        tokens, columns = self.values.shape
        step = max(1, PRODUCT_ELEMENTS // max(1, columns))
        return (slice(start, start + step) for start in range(0, tokens if columns else 0, step))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, layer: OutputLayer, keep: bool
    ) -> tuple[Tensor, Tensor]:
        highest = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
        sums = highest.new_zeros(3, len(hidden))
        kept = Exponentials.of(hidden, layer.shard.size) if keep else None
        for rows in layer.chunks(len(hidden)):
            logits, part = layer.logits(hidden[rows], weight), None if kept is None else kept[rows]
            highest[rows], sums[:, rows] = _chunk_sums(logits, layer.columns(labels[rows]), part)
        total, weighted, label_logit = _over_vocabulary(highest, sums, layer.shard)
        log_total = total.log()
        entropy, logprobs = log_total - weighted / total, label_logit - highest - log_total
        ctx.save_for_backward(hidden, weight, labels, highest + log_total, logprobs)
        ctx.layer, ctx.kept = layer, kept
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, normaliser, logprobs = ctx.saved_tensors
        layer, kept, ctx.kept = ctx.layer, ctx.kept, None  # kept exponentials become gradients, once
        vocabulary, grad_hidden = slice(layer.shard.size), torch.zeros_like(hidden)
        grad_weight = _WeightGradient.of(layer) if ctx.needs_input_grad[1] else None
        scale, label_gradients = grads[0] / layer.temperature, -torch.expm1(logprobs)
        for rows in layer.chunks(len(hidden)) if kept is None else kept.parts():
            values = layer.logits(hidden[rows], weight) if kept is None else kept[rows]
            labelled = *layer.columns(labels[rows]), label_gradients[rows]
            grad = _logit_gradients(values, normaliser[rows], scale[rows], labelled, hidden.dtype)
            grad = layer.through_transform(grad, hidden[rows], weight)
            grad_hidden[rows] = grad @ weight[vocabulary]
            if grad_weight is not None:
                add_product(grad_weight.total[vocabulary], grad.T, hidden[rows])
        return grad_hidden, None if grad_weight is None else grad_weight.finish(), None, None, None


@dataclass(frozen=True)
class _WeightGradient:
    """The float32 sum of the weight's gradient, [rows, hidden size]: Megatron's own buffer, if it has one."""

    total: Tensor
    layer: OutputLayer
    buffer: bool

    @classmethod
    def of(cls, layer: OutputLayer) -> _WeightGradient:
        buffer = getattr(layer.weight, "main_grad", None)
        if buffer is not None and buffer.dtype is torch.float32:
            return cls(buffer, layer, True)
        return cls(torch.zeros_like(layer.weight, dtype=torch.float32), layer, False)

    def finish(self) -> Tensor | None:
        """Returns the gradient for autograd: none of its own if it is in the buffer."""
        weight: Any = self.layer.weight
        if not self.buffer:
            return self.total.to(weight.dtype)
        if self.layer.shared:
            return None  # the embedding's gradient comes the usual way
        weight.grad_added_to_main_grad = True  # Megatron drops the gradient, but wants one
        return torch.empty_like(weight)


def _chunk_sums(logits: Tensor, labels: tuple[Tensor, Tensor], kept: Exponentials | None) -> tuple[Tensor, Tensor]:
    """Returns the highest logit of each token [n] and three sums [3, n]. Overwrites `logits` [n, shard.size], fills `kept`.

    The sums are of exp(logit - highest), of exp(logit - highest) * (logit - highest), and of the label's own logit.
    `labels`: see `OutputLayer.columns`.
    """
    column, inside = labels
    if logits.is_cuda:
        from dagrl.workers.train.logprob_kernels import chunk_sums

        return chunk_sums(logits, column, inside, None if kept is None else (kept.values, kept.tops))
    label_logit = torch.where(inside, logits.gather(-1, column[:, None]).squeeze(-1), 0.0)
    highest = logits.amax(-1)
    relative = logits.sub_(highest[:, None])
    exponentials = relative.exp()
    if kept is not None:
        kept.values.copy_(exponentials), kept.tops.copy_(highest[:, None])
    return highest, torch.stack((exponentials.sum(-1), torch.linalg.vecdot(exponentials, relative), label_logit))


def _logit_gradients(
    values: Tensor | Exponentials,
    normaliser: Tensor,
    scale: Tensor,
    labels: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Returns `scale` [n] times the log-probabilities' gradient, [n, shard.size] in `dtype`. Overwrites `values`.

    `values` are logits, or exponentials. `labels`: see `OutputLayer.columns`, and 1 - probability [n], which exponentials in
    half precision do not give for a label that is almost certain.
    """
    column, inside, of_label = labels
    if normaliser.is_cuda:
        from dagrl.workers.train.logprob_kernels import logit_gradients

        source, tops = (values.values, values.tops) if isinstance(values, Exponentials) else (values, None)
        return logit_gradients(source, tops, normaliser, scale, labels, dtype)
    if isinstance(values, Exponentials):
        probabilities = values.values.float() * (values.tops - normaliser[:, None]).exp()
    else:
        probabilities = values.sub_(normaliser[:, None]).exp_()
    grad = probabilities.mul_(-scale[:, None])
    own = torch.where(inside, scale * of_label, grad.gather(-1, column[:, None])[:, 0])
    return grad.scatter_(-1, column[:, None], own[:, None]).to(dtype)


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


def product(left: Tensor, right: Tensor) -> Tensor:
    """Returns the matrix product in float32. On a GPU half-precision products are accumulated without rounding."""
    if left.is_cuda and left.dtype is not torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the matrix product to `total`, within the product's kernel if torch can."""
    if total.dtype is left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and total.dtype is torch.float32 and _adds_products(left.device, left.dtype):
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    else:
        total += product(left, right)


@cache
def _adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a half-precision product to a float32 matrix."""
    total, identity = torch.ones(8, 8, device=device), torch.eye(8, device=device, dtype=dtype)
    try:
        torch.ops.aten.addmm.dtype_out(total, identity, identity, torch.float32, out=total)
    except RuntimeError as error:  # also raised for arguments that an operator does not support
        logger.info("torch cannot add half-precision products to a float32 matrix, so they are added separately: %s", error)
        return False
    return bool((total == 1 + identity).all())
