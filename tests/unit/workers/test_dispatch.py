"""Tokens sorted by expert and summed, against a loop over the experts in float64."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core")
WIDTH = 12


def routed(tokens: int, experts: int, chosen: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Experts of each token [tokens, chosen], their map and their weights [tokens, experts]."""
    generator = torch.Generator().manual_seed(tokens + 100 * experts)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :chosen]
    mask = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, ids, True)
    weights = torch.rand(tokens, experts, generator=generator, dtype=torch.float64) * mask
    return ids.to(device), mask.to(device), weights.to(device)


def dispatched(hidden: Tensor, ids: Tensor, mask: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Dispatches rows to experts. Expert e multiplies tanh of its rows by row e of `scales` [experts, width]."""
    from dagrl.workers.megatron.experts import LocalDispatcher

    router: Any = SimpleNamespace(chosen=ids)
    layer = LocalDispatcher(router)
    rows, probs = layer.dispatch_preprocess(hidden, mask, weights)
    rows, counts, probs = layer.dispatch_postprocess(*layer.token_dispatch(rows, probs))
    assert counts.tolist() == mask.sum(0).tolist()
    outputs = rows.tanh() * scales.repeat_interleave(counts, 0) * probs[:, None].to(rows.dtype)
    return layer.combine_postprocess(layer.token_combine(layer.combine_preprocess(outputs)))


def looped(hidden: Tensor, mask: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    flat, total = hidden.view(-1, hidden.shape[-1]), torch.zeros_like(hidden).view(-1, hidden.shape[-1])
    for expert in range(mask.shape[1]):
        held = mask[:, expert].nonzero()[:, 0]
        total = total.index_add(0, held, flat[held].tanh() * scales[expert] * weights[held, expert, None])
    return total.view_as(hidden)


@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(0, 12), experts=st.integers(1, 7), data=st.data())
def test_outputs_and_gradients_are_those_of_a_loop(tokens: int, experts: int, data: st.DataObject) -> None:
    ids, mask, weights = routed(tokens, experts, data.draw(st.integers(1, experts)))
    hidden, scales, upper = (torch.randn(*shape, WIDTH).double() for shape in ((tokens, 1), (experts,), (tokens, 1)))
    inputs = [one.requires_grad_() for one in (hidden, weights, scales)]
    found, expected = dispatched(hidden, ids, mask, weights, scales), looped(hidden, mask, weights, scales)
    torch.testing.assert_close(found, expected)
    for gradient, truth in zip(
        torch.autograd.grad(found, inputs, upper), torch.autograd.grad(expected, inputs, upper), strict=True
    ):
        torch.testing.assert_close(gradient, truth)
