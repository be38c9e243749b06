"""Log-probabilities in chunks against torch's own; how they add up over workers is tested with the worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workers.megatron.logprobs import OutputLayer, VocabularyPart, token_logprobs

PADDED, SIZE, HIDDEN = 128, 100, 24  # 28 rows of padding, not to be counted


@pytest.mark.parametrize("chunk", [None, 4], ids=["whole", "chunks"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_log_softmax(chunk: int | None, temperature: float) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 7, HIDDEN), torch.randn(PADDED, HIDDEN)
    labels, weights = torch.randint(0, SIZE, (3, 7)), torch.randn(3, 7)

    mine = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found, entropy = token_logprobs(mine[0], labels, OutputLayer(mine[1], VocabularyPart(0, SIZE), temperature, chunk))
    (found * weights).sum().backward()

    theirs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    distribution = ((theirs[0] @ theirs[1].T)[..., :SIZE] / temperature).log_softmax(-1)
    expected = distribution.gather(-1, labels[..., None])[..., 0]
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, -(distribution.exp() * distribution).sum(-1), rtol=1e-5, atol=1e-5)
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad


def test_extreme_logits_stay_finite() -> None:
    weight = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    found, entropy = token_logprobs(torch.ones(1, 1), torch.tensor([1]), OutputLayer(weight, VocabularyPart(0, 3)))
    found.sum().backward()
    assert found.item() == -2e4 and entropy.item() == 0
    assert weight.grad is not None and torch.isfinite(weight.grad).all()


class _Largest(TorchDispatchMode):
    """The most elements that any tensor had that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
        self.elements = max([self.elements, *made])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_never_exist_whole(dtype: torch.dtype) -> None:
    """Forward and backward: the largest tensor is a chunk of logits, or the output layer's gradient."""
    tokens, vocabulary, chunk = 512, 4096, 32
    hidden = torch.randn(tokens, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, 8, dtype=dtype, requires_grad=True)
    with _Largest() as largest:
        layer = OutputLayer(weight, VocabularyPart(0, vocabulary), chunk_tokens=chunk)
        logprobs, _ = token_logprobs(hidden, torch.zeros(tokens, dtype=torch.int64), layer)
        logprobs.sum().backward()
    assert largest.elements == chunk * vocabulary
