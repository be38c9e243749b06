"""The kernel that adds gradients, against torch, byte for byte."""

import pytest
import torch

from tests.gpu.kernels import DEVICE, kernel_tests, large

pytest.importorskip("triton")
pytestmark = kernel_tests


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [large((151936, 1024)), (3, 4097), (5,), (0, 7)], ids=str)
def test_gradients_are_added_in_float32(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from dagrl.workers.fsdp.gradient_kernels import add_gradient

    first, second = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    total = add_gradient(None, first)
    assert torch.equal(total, first.float()) and total.dtype is torch.float32
    expected = total + second
    assert add_gradient(total, second) is total and torch.equal(total, expected)
