"""Sorts tokens by expert and sums their outputs, on a worker that holds all experts whole (ep 1, etp 1).

Megatron's dispatcher reads on the host how many tokens each expert has, so that every layer waits for the device, copies all
rows once more in each direction, and sums by atomic additions. Here the order is computed on the device, and the sum of a
token's rows is one kernel. Each is the other's backward pass. Imported only where Megatron is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from dagrl.workers.megatron.router import Router


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
    """In place of a layer's `MoEAlltoAllTokenDispatcher`; the methods are those that `MoELayer` calls."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def dispatch_preprocess(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rows [n, hidden size] sorted by expert, and the router's weight of each."""
        self._shape, self._counts = hidden.shape, routing_map.sum(0)
        self._order, experts = sort_by_expert(self._router.chosen)
        rows: Tensor = _Spread.apply(hidden.view(-1, hidden.shape[-1]), self._order)  # type: ignore[no-untyped-call]
        return rows, probs.flatten().index_select(0, self._order.tokens * probs.shape[1] + experts)

    def token_dispatch(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows stay on this worker."""
        return rows, probs

    def dispatch_postprocess(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows, each expert's number of them on the device, and weights."""
        return rows, self._counts, probs

    def combine_preprocess(self, outputs: Tensor) -> Tensor:
        """Outputs are sorted already, and stay on this worker."""
        return outputs

    token_combine = combine_preprocess

    def combine_postprocess(self, outputs: Tensor) -> Tensor:
        """Returns the sum of each token's outputs, in the shape of the hidden states."""
        summed: Tensor = _Sum.apply(outputs, self._order)  # type: ignore[no-untyped-call]
        return summed.view(self._shape)


def use_local_dispatch(model: torch.nn.Module) -> None:
    """Gives the layers of a model whose experts are all on this worker a `LocalDispatcher`."""
    for layer in model.modules():
        if isinstance(layer, MoELayer) and layer.token_dispatcher.ep_size == layer.token_dispatcher.tp_size == 1:
            layer.token_dispatcher = LocalDispatcher(layer.router)


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
