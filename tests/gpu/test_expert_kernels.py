"""Kernels of experts against torch: sums of each token's rows, and zeros where an expert has no rows."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.kernels import DEVICE, kernel_tests

pytest.importorskip("triton")
pytestmark = kernel_tests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "chosen", "width"), [(1, 1, 40), (33, 8, 2048), (0, 2, 64), (5, 3, 1)])
def test_rows_of_a_token_are_summed(tokens: int, chosen: int, width: int, dtype: torch.dtype) -> None:
    from dagrl.workers.megatron.triton_kernels import sum_rows_on_gpu

    states = torch.randn(max(tokens * chosen, 1), width, device=DEVICE).to(dtype)
    rows = torch.randperm(tokens * chosen, device=DEVICE).view(tokens, chosen)
    expected = states.double()[rows].sum(1)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(sum_rows_on_gpu(states, rows).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("counts", [[0, 3, 0, 0, 2, 0], [0, 0], [4]], ids=str)
def test_only_matrices_of_experts_without_rows_are_cleared(counts: list[int]) -> None:
    from dagrl.workers.megatron.triton_kernels import clear_empty

    matrices = torch.randn(len(counts), 70, 90, device=DEVICE)
    expected = matrices.clone()
    expected[torch.tensor(counts, device=DEVICE) == 0] = 0
    clear_empty(matrices, torch.tensor(counts, device=DEVICE).cumsum(0))
    assert torch.equal(matrices, expected)
