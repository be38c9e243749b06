"""The kernel that quantizes a matrix to FP8 in both memory orders, against torch on the CPU, byte for byte."""

from __future__ import annotations

import pytest
import torch

from dagrl.workers.megatron.float8 import E4M3, E5M2, quantize
from tests.gpu.kernels import DEVICE, exact_in_fp8, kernel_tests, large, rounds_fp8

pytest.importorskip("triton")
pytestmark = kernel_tests


@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=rounds_fp8)], ids=["exact", "rounded"])
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (37, 48), (256, 192), large((1000, 2560))], ids=str)
def test_rows_and_columns_are_those_of_torch(shape: tuple[int, int], form: torch.dtype, exact: bool) -> None:
    from dagrl.workers.megatron.triton_kernels import quantize_to

    torch.manual_seed(1)
    drawn = exact_in_fp8(shape, form, 1) if exact else torch.randn(shape) * torch.logspace(-6, 3, shape[1])
    matrix = drawn.bfloat16()
    expected = quantize(matrix, form, columns=True)
    wide = torch.nn.functional.pad(matrix.to(DEVICE), (3, 5))
    for states in (matrix.to(DEVICE), wide[:, 3:-5], matrix.to(DEVICE).t().contiguous().t()):
        rows, columns = (torch.full(one.shape, 7.0, device=DEVICE).to(form) for one in (expected.rows, expected.columns))
        quantize_to(rows, columns, states, expected.scale.to(DEVICE))
        assert torch.equal(rows.cpu().float(), expected.rows.float())  # -0 equals 0
        assert torch.equal(columns.cpu().float(), expected.columns.float())
        columns.zero_()
        quantize_to(rows[:0], columns, states, expected.scale.to(DEVICE))
        assert torch.equal(columns.cpu().float(), expected.columns.float())
