"""Kernels of the output layer against float64: sums over each row of logits, and their gradients."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.kernels import DEVICE, kernel_tests

pytest.importorskip("triton")
pytestmark = kernel_tests


@pytest.mark.parametrize("size", [1, 300, 9000])
@pytest.mark.parametrize("kept", [False, True], ids=["computed", "kept"])
def test_sums_and_gradients_are_those_of_float64(size: int, kept: bool) -> None:
    """Two of the labels are another worker's. Exponentials are kept in bfloat16, relative to the top of their tile."""
    from dagrl.workers.train.logprob_kernels import TILE, chunk_sums, logit_gradients

    torch.manual_seed(size)
    rows = 7
    logits = torch.randn(rows, size, device=DEVICE) * 4
    columns = torch.randint(0, size, (rows,), device=DEVICE)
    inside = torch.arange(rows, device=DEVICE) >= 2
    exact = logits.double()
    highest, chosen = exact.amax(-1), exact.gather(-1, columns[:, None])[:, 0]
    weights = (exact - highest[:, None]).exp()
    expected = torch.stack((weights.sum(-1), (weights * (exact - highest[:, None])).sum(-1), torch.where(inside, chosen, 0)))
    values = torch.empty(rows, size, dtype=torch.bfloat16, device=DEVICE)
    tops = torch.empty(rows, -(-size // TILE), device=DEVICE)
    found_highest, found = chunk_sums(logits.clone(), columns, inside, (values, tops) if kept else None)
    torch.testing.assert_close(found_highest.double(), highest)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)

    normaliser, scale = highest + expected[0].log(), torch.randn(rows, device=DEVICE)
    probabilities = (exact - normaliser[:, None]).exp()
    truth = -scale.double()[:, None] * probabilities
    own = torch.where(inside, scale * (1 - (chosen - normaliser).exp()), truth.gather(-1, columns[:, None])[:, 0])
    truth.scatter_(-1, columns[:, None], own[:, None])
    labels = columns, inside, -torch.expm1(chosen - normaliser).float()
    source = values if kept else logits.clone()
    gradients = logit_gradients(source, tops if kept else None, normaliser.float(), scale, labels, torch.bfloat16)
    assert gradients.dtype is torch.bfloat16
    torch.testing.assert_close(gradients.double(), truth, rtol=2e-2, atol=1e-6)
