"""Copies in half precision of float32 weights, against a model in half precision and torch's own sums."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dagrl.workers.fsdp.copies import ComputeCopies


class Tied(nn.Module):
    """An embedding that is the head, too, a frozen layer, and a weight in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.inner, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.narrow = nn.Linear(8, 8, bias=False).bfloat16()
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.narrow(self.frozen(self.inner(self.embedding(tokens)))))
        return hidden


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def test_passes_are_those_of_half_precision_and_gradients_add_up_in_float32(model: Tied) -> None:
    plain = copy.deepcopy(model).bfloat16()
    before = {name: (id(one), one.dtype) for name, one in model.named_parameters()}
    copies = ComputeCopies(model, torch.bfloat16)
    sums: dict[str, torch.Tensor] = {}
    for part in torch.randint(11, (3, 2, 5)):
        copies.gather()
        output = model(part)
        torch.testing.assert_close(output, plain(part), atol=0, rtol=0)
        (output.float() ** 2).sum().backward()
        plain.zero_grad()
        (plain(part).float() ** 2).sum().backward()
        for name, one in plain.named_parameters():
            if one.grad is not None:
                sums[name] = sums.get(name, torch.zeros(())) + one.grad.float()
    copies.free()
    assert before == {name: (id(one), one.dtype) for name, one in model.named_parameters()}
    for name, one in model.named_parameters():
        if name == "narrow.weight":  # has no copy, and adds up as it is
            continue
        assert (one.grad is None) == name.startswith("frozen")
        if one.grad is not None:
            torch.testing.assert_close(one.grad, sums[name], atol=0, rtol=0)


def test_copies_have_memory_and_the_latest_values_only_while_gathered(model: Tied) -> None:
    copies = ComputeCopies(model, torch.bfloat16)
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.inner.weight.fill_(value)
        copies.gather()
        gathered = model.inner.weight
        assert gathered.dtype is torch.bfloat16 and bool((gathered == value).all())
        assert model.head.weight is model.embedding.weight
        copies.free()
        assert gathered.untyped_storage().nbytes() == 0 and model.inner.weight.dtype is torch.float32
