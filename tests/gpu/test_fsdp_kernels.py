"""Kernels of FSDP workers, against torch."""

import pytest
import torch

from tests.gpu.kernels import DEVICE, kernel_tests, large

pytest.importorskip("triton")
pytestmark = kernel_tests


@pytest.mark.parametrize("shape", [large((151936, 1024)), (3, 4097), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_added_in_float32(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from dagrl.workers.fsdp.kernels import add

    left, right = torch.randn(shape, device=DEVICE).to(dtype), torch.randn(shape, device=DEVICE).bfloat16()
    expected = left.float() + right.float()
    total = add(left, right)
    assert torch.equal(total, expected) and (total is left) == (dtype is torch.float32)
