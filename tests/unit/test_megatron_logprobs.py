"""Chunked log-probabilities against torch's own; how they add up over workers is tested with the worker."""

from __future__ import annotations

import pytest
import torch

from workers.megatron import logprobs
from workers.megatron.logprobs import VocabularyPart, token_logprobs


@pytest.mark.parametrize("chunk", [1 << 24, 300], ids=["whole", "chunks"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_log_softmax(
    chunk: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    padded, size = torch.randn(3, 7, 128, dtype=torch.float32) * 5, 100  # 28 columns of padding, not to be counted
    labels, weights = torch.randint(0, size, (3, 7)), torch.randn(3, 7)

    mine = padded.clone().requires_grad_()
    found, entropy = token_logprobs(mine, labels, VocabularyPart(0, size), temperature)
    (found * weights).sum().backward()

    theirs = padded.clone().requires_grad_()
    distribution = (theirs[..., :size] / temperature).log_softmax(-1)
    expected = distribution.gather(-1, labels[..., None])[..., 0]
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, -(distribution.exp() * distribution).sum(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert not entropy.requires_grad


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    found, entropy = token_logprobs(logits, torch.tensor([1]), VocabularyPart(0, 3))
    found.sum().backward()
    assert found.item() == -2e4 and entropy.item() == 0
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
