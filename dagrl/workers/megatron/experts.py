"""The experts of a layer as grouped matrix products: one launch for all experts instead of one each.

Tokens are sorted by expert on the device where a worker holds all experts whole (`LocalDispatcher`). Parameters, names and
checkpoints are those of Megatron's `SequentialMLP`, with one weight per expert. Megatron's own grouped
experts need Transformer Engine or the `grouped_gemm` extension. torch's `grouped_mm` needs all weights in one tensor, so
those of a layer's experts lie at equal distances in one memory (`join_weights`, and `experts_last_first` for Megatron's
buffers). Nothing waits for the device: it knows where the rows of each expert end.

In bfloat16 on Hopper and Blackwell a product is one kernel; elsewhere torch loops over the experts. Rows must be a multiple
of 16 bytes (`architecture.EXPERT_MULTIPLE`). Imported only where Megatron is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn.functional import grouped_mm

from dagrl.errors import ConfigError

_EXPERT = re.compile(r"(.*\blocal_experts\.)(\d+)\.")
Held = TypeVar("Held")


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Megatron's `SequentialMLP`, computed for all experts of this worker at once.

    The token dispatcher handles sharded experts (etp) and experts on other workers (ep): tokens that arrive here are
    multiplied by the local weights without a collective. The experts' linear layers are never called, so their hooks, such
    as Megatron's overlapped parameter gathering, do not run.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert not self.config.add_bias_linear, "grouped products support no bias"

    def join_weights(self) -> None:
        """Moves the first weights of all experts into one tensor, and the second ones into another."""
        for layers in zip(*((expert.linear_fc1, expert.linear_fc2) for expert in self.local_experts), strict=True):
            together = torch.stack([layer.weight.data for layer in layers])
            for layer, place in zip(layers, together, strict=True):
                layer.weight.data = place

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Returns outputs [tokens, hidden size] and no bias, for `hidden` [tokens, hidden size] sorted by expert.

        `tokens_per_expert` [experts] is int64, on the device (`LocalDispatcher`) or on the host (Megatron's dispatcher).
        `probs` [tokens] are the router's weights.
        """
        offsets = row_offsets(tokens_per_expert, hidden)
        layers = [(expert.linear_fc1.weight, expert.linear_fc2.weight) for expert in self.local_experts]
        first, second = (_ExpertLinear(weights, offsets) for weights in zip(*layers, strict=True))
        output, _ = MLP.forward(_MlpModule(self.config, self.local_experts[0].activation_func, first, second), hidden, probs)
        return output, None


class _ExpertLinear(torch.nn.Module):
    """One linear layer of all experts; a module, as `MLP.forward` requires since Megatron-Core 0.19."""

    def __init__(self, weights: Sequence[Tensor], offsets: Tensor) -> None:
        super().__init__()
        self.weights, self.offsets = weights, offsets

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        return _ExpertProducts.apply(rows, self.offsets, *self.weights), None  # type: ignore[no-untyped-call]


class _MlpModule(NamedTuple):
    """The attributes that `MLP.forward` reads, so that Megatron computes activation and probabilities."""

    config: Any
    activation_func: Callable[[Tensor], Tensor]
    linear_fc1: torch.nn.Module
    linear_fc2: torch.nn.Module


def check_grouped_kernel() -> None:
    """Raises ConfigError on GPUs where the host has a part in grouped products, which a CUDA graph cannot have."""
    major, minor = torch.cuda.get_device_capability()
    if major not in (9, 10):
        raise ConfigError(
            "policy.megatron_cfg.cuda_graphs is true, and the model has experts, whose grouped products are one kernel on "
            f"GPUs of compute capability 9 and 10; {torch.cuda.get_device_name()} has {major}.{minor}. Set cuda_graphs=false"
        )


def row_offsets(tokens_per_expert: Tensor, rows: Tensor) -> Tensor:
    """Returns where the rows of each expert end [experts], int32 on the device of `rows`, without waiting for it."""
    counted = not tokens_per_expert.is_cuda  # reading it from the device would wait
    assert not counted or int(tokens_per_expert.sum()) == len(rows), f"{len(rows)} rows for experts with {tokens_per_expert}"
    return tokens_per_expert.cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Returns weights of one shape as [experts, outputs, inputs], without a copy if they lie at equal distances."""
    whole = joined(weights)
    return torch.stack(list(weights)) if whole is None else whole


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns a view [n, ...] of `n` tensors of one shape that lie at equal distances in one memory, in order; else None."""
    first, places, size = tensors[0], [tensor.data_ptr() for tensor in tensors], tensors[0].element_size()
    step = places[1] - places[0] if len(places) > 1 else first.numel() * size
    regular = step > 0 and step % size == 0 and all(after - before == step for before, after in pairwise(places))
    if not regular or any(tensor.shape != first.shape or tensor.stride() != first.stride() for tensor in tensors):
        return None
    memory = first.untyped_storage()
    if places[-1] + first.numel() * size > memory.data_ptr() + memory.nbytes():  # other tensors may follow by chance
        return None
    return first.as_strided((len(tensors), *first.shape), (step // size, *first.stride()))


def experts_last_first(named: Iterable[tuple[str, Held]]) -> Iterator[tuple[str, Held]]:
    """Yields named parameters, those of a layer's experts from the last expert to the first.

    Megatron fills its gradient and weight buffers from their end, which brings the experts in order.
    """

    def place(item: tuple[str, Held]) -> tuple[str, int]:
        match = _EXPERT.match(item[0])
        return ("", 0) if match is None else (match[1], -int(match[2]))

    for _, items in groupby(named, lambda item: place(item)[0]):
        yield from sorted(items, key=place)


class _ExpertProducts(torch.autograd.Function):
    """Multiplies each row [inputs] by its expert's weight [outputs, inputs] -> [tokens, outputs].

    Saves the original weights, so that a layer keeps no second copy until its backward pass.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, offsets: Tensor, *weights: Tensor) -> Tensor:
        rows = rows.contiguous()
        ctx.save_for_backward(rows, offsets, *weights)
        if not len(rows):
            return rows.new_empty(0, len(weights[0]))
        return grouped_mm(rows, stacked(weights).transpose(1, 2), offs=offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, offsets, *weights = ctx.saved_tensors
        upper, trained = gradients[0].contiguous(), any(ctx.needs_input_grad[2:])
        if not len(rows):
            return torch.zeros_like(rows), None, *(torch.zeros_like(weight) if trained else None for weight in weights)
        of_rows = grouped_mm(upper, stacked(weights), offs=offsets) if ctx.needs_input_grad[0] else None
        of_weights = _weight_gradients(upper, rows, offsets, weights) if trained else [None] * len(weights)
        return of_rows, None, *of_weights


def _weight_gradients(upper: Tensor, rows: Tensor, offsets: Tensor, weights: Sequence[Any]) -> Sequence[Tensor]:
    """Returns a gradient for each weight, zeros for experts without rows.

    Where Megatron's gradient buffers are joined, one kernel adds all of them, and Megatron then drops the weights' own, as
    with `gradient_accumulation_fusion`.
    """
    # Left column-major, right row-major: no other layout supports any number of rows per expert.
    gradients = grouped_mm(upper.t(), rows, offs=offsets)
    if gradients.is_cuda:  # some GPUs write none for experts without rows (pytorch/pytorch#172439)
        from dagrl.workers.megatron.triton_kernels import clear_empty

        clear_empty(gradients, offsets)
    buffers = [getattr(weight, "main_grad", None) for weight in weights]
    total = None if any(buffer is None for buffer in buffers) else joined(buffers)  # type: ignore[arg-type]
    if total is not None:
        total.add_(gradients)
        for weight in weights:
            weight.grad_added_to_main_grad = True
    return gradients.unbind()


class RowOrder(NamedTuple):
    """Rows sorted by expert: the token of each [n], and the rows of each token [tokens, top k], with n = tokens * top k."""

    tokens: Tensor
    rows: Tensor


def sort_by_expert(chosen: Tensor) -> tuple[RowOrder, Tensor]:
    """Returns the order for the experts `chosen` [tokens, top k] by each token, and the expert of each row."""
    experts, order = chosen.flatten().sort(stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return RowOrder(order // chosen.shape[1], rows.view_as(chosen)), experts


class LocalDispatcher:
    """Sorts tokens by expert and sums their outputs, on a worker that holds all experts whole (ep 1, etp 1).

    It replaces a layer's `MoEAlltoAllTokenDispatcher`, with the methods that `MoELayer` calls. Megatron's reads on
    the host how many tokens each expert has, so that every layer waits for the device, copies all rows once more in each
    direction, and sums by atomic additions. Here the order is computed on the device, and the sum of a token's rows is one
    kernel. Each is the other's backward pass.
    """

    def __init__(self, router: Any) -> None:
        self._router = router

    def dispatch_preprocess(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rows [n, hidden size] sorted by expert, and the router's weight of each."""
        self._shape, self._counts = hidden.shape, routing_map.sum(0)
        self._order, experts = sort_by_expert(self._router.chosen)
        rows: Tensor = _Spread.apply(hidden.view(-1, hidden.shape[-1]), self._order)  # type: ignore[no-untyped-call]
        return rows, probs.flatten().index_select(0, self._order.tokens * probs.shape[1] + experts)

    def token_dispatch(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns its arguments: rows stay on this worker."""
        return rows, probs

    def dispatch_postprocess(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows, each expert's number of them on the device, and weights."""
        return rows, self._counts, probs

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """Returns no buffers for `MoELayer` of Megatron-Core 0.19 to have outputs and gradients written to."""
        return None, None

    def combine_preprocess(self, outputs: Tensor) -> Tensor:
        """Returns its argument: outputs are sorted already, and stay on this worker."""
        return outputs

    token_combine = combine_preprocess

    def combine_postprocess(self, outputs: Tensor) -> Tensor:
        """Returns the sum of each token's outputs, in the shape of the hidden states."""
        summed: Tensor = _Sum.apply(outputs, self._order)  # type: ignore[no-untyped-call]
        return summed.view(self._shape)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return states.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return sum_rows(grads[0].contiguous(), ctx.order.rows), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return sum_rows(outputs, order.rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.order.tokens), None


def sum_rows(states: Tensor, rows: Tensor) -> Tensor:
    """Sums the `rows` [tokens, k] of `states` [n, width] for each token -> [tokens, width]."""
    if states.is_cuda:
        from dagrl.workers.megatron.triton_kernels import sum_rows_on_gpu

        return sum_rows_on_gpu(states, rows)
    return states.index_select(0, rows.flatten()).view(*rows.shape, states.shape[1]).sum(1)
