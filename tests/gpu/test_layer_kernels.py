"""Our rotary embedding and RMSNorm kernels against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 8e-3}  # relative, of the largest value
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert float(error) < TOLERANCES[dtype]


@dtypes
@pytest.mark.parametrize("shape", [(7, 3, 16, 128), (130, 1, 5, 64), (3, 2, 1, 48)], ids=str)
def test_rotary_embedding(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from dagrl.workers.megatron.layer_kernels import rotate

    length, batch, heads, width = shape
    fused = torch.randn(length, batch, heads + 4, width, device="cuda", dtype=dtype)
    states = fused[:, :, 2:-2].requires_grad_()  # a view, as queries are of a fused projection
    half = torch.rand(length, 1, 1, width // 2, device="cuda") * 100
    angles = torch.cat((half, half), -1)
    exact = states.detach().double().requires_grad_()
    turned = torch.cat((-exact[..., width // 2 :], exact[..., : width // 2]), -1)
    expected = exact * angles.double().cos() + turned * angles.double().sin()
    found = rotate(states, angles)
    close(found, expected, dtype)
    upper = torch.randn(shape, device="cuda", dtype=dtype)
    close(torch.autograd.grad(found, states, upper)[0], torch.autograd.grad(expected, exact, upper.double())[0], dtype)


@dtypes
@pytest.mark.parametrize("shape", [(16384, 16, 128), (33, 2, 1024), (5, 2560), (1, 100)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from dagrl.workers.megatron.layer_kernels import rms_norm

    states = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(shape[-1], device="cuda", dtype=dtype, requires_grad=True)
    inputs = [value.detach().double().requires_grad_() for value in (states, weight)]
    expected = torch.nn.functional.rms_norm(inputs[0], shape[-1:], inputs[1], 1e-6)
    found = rms_norm(states, weight, 1e-6)
    close(found, expected, dtype)
    upper = torch.randn(shape, device="cuda", dtype=dtype)
    gradients = torch.autograd.grad(found, (states, weight), upper)
    for mine, exact in zip(gradients, torch.autograd.grad(expected, inputs, upper.double()), strict=True):
        close(mine, exact, dtype)
