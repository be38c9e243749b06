"""Our Triton kernels against plain torch, in float64 or byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.kernels import DEVICE, kernel_tests, large

pytest.importorskip("triton")
pytestmark = kernel_tests

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 8e-3}  # relative, of the largest value
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def in_float64(*tensors: Tensor) -> list[Tensor]:
    return [one.detach().double().requires_grad_() for one in tensors]


def check(found: Any, inputs: Any, expected: Any, exact: Any, uppers: Any = ()) -> None:
    """Compares results, and their gradients by `inputs`, with the `expected` ones, by `exact`, in float64."""
    uppers = uppers or [torch.randn_like(one) for one in found]
    gradients = torch.autograd.grad(found, inputs, uppers)
    truths = torch.autograd.grad(expected, exact, [one.double() for one in uppers])
    dtypes = [found[0].dtype] * len(found) + [one.dtype for one in inputs]
    for mine, truth, dtype in zip((*found, *gradients), (*expected, *truths), dtypes, strict=True):
        assert mine.shape == truth.shape and mine.dtype is dtype
        if mine.numel():
            assert float((mine.double() - truth).abs().max() / truth.abs().max()) < TOLERANCES[found[0].dtype]


def rotated(states: Tensor, angles: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    return states * angles.double().cos() + torch.cat((-second, first), -1) * angles.double().sin()


def random_angles(length: int, size: int) -> Tensor:
    half = torch.rand(length, 1, 1, size // 2, device=DEVICE) * 100
    return torch.cat((half, half), -1)


@dtypes
@pytest.mark.parametrize("shape", [(7, 3, 16, 128), (130, 1, 5, 64), (3, 2, 1, 48)], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.5], ids=["whole", "partial"])
def test_rotary_embedding(shape: tuple[int, ...], share: float, dtype: torch.dtype) -> None:
    from dagrl.workers.megatron.triton_kernels import rotate

    length, batch, heads, width = shape
    fused = torch.randn(length, batch, heads + 4, width, device=DEVICE, dtype=dtype)
    states = fused[:, :, 2:-2].requires_grad_()  # a view, as queries are of a fused projection
    rotary, (exact,) = int(share * width), in_float64(states)
    angles = random_angles(length, rotary)
    expected = torch.cat((rotated(exact[..., :rotary], angles), exact[..., rotary:]), -1)
    check([rotate(states, angles)], [states], [expected], [exact])


@dtypes
@pytest.mark.parametrize("shape", [large((16384, 16, 128)), (33, 2, 1024), (5, 2560), (1, 100)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from dagrl.workers.megatron.triton_kernels import rms_norm

    states = torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True)
    weight = torch.randn(shape[-1], device=DEVICE, dtype=dtype, requires_grad=True)
    exact = in_float64(states, weight)
    expected = torch.nn.functional.rms_norm(exact[0], shape[-1:], exact[1], 1e-6)
    check([rms_norm(states, weight, 1e-6)], [states, weight], [expected], exact)


@dtypes
@pytest.mark.parametrize("shape", [large((4096, 2, 8, 2, 128)), (70, 3, 2, 4, 128), (9, 2, 3, 1, 48)], ids=str)
def test_heads_are_split_normalized_and_rotated(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dagrl.workers.megatron import triton_kernels

    monkeypatch.setattr(triton_kernels, "HEAD_PROGRAMS", 64)
    length, batch, groups, ratio, size = shape
    mixed = torch.randn(length, batch, groups, (ratio + 2) * size, device=DEVICE, dtype=dtype, requires_grad=True)
    norms = [torch.randn(size, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(2)]
    angles, exact = random_angles(length, size), in_float64(mixed, *norms)
    queries, keys, values = torch.split(exact[0], [ratio * size, size, size], 3)
    parts = zip((queries.reshape(length, batch, -1, size), keys), exact[1:], strict=True)
    expected = [rotated(torch.nn.functional.rms_norm(part, (size,), norm, 1e-6), angles) for part, norm in parts]
    found = triton_kernels.split_heads(mixed, (norms[0], norms[1]), 1e-6, angles)
    uppers = [
        torch.randn(batch, one.shape[2], length, size, device=DEVICE, dtype=dtype).permute(2, 0, 1, 3) for one in found
    ]
    check(found, [mixed, *norms], [*expected, values], exact, uppers)


@dtypes
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("shape", [large((4096, 2, 6144)), (33, 2, 100), (0, 64), (1, 2), (700, 1536)], ids=str)
def test_swiglu(shape: tuple[int, ...], weighted: bool, dtype: torch.dtype) -> None:
    from dagrl.workers.megatron.triton_kernels import swiglu

    inputs = [torch.randn(shape, device=DEVICE, dtype=dtype).mul(3).requires_grad_()]
    if weighted:  # as a router gives them
        inputs.append(torch.rand(*shape[:-1], 1, device=DEVICE, requires_grad=True))
    exact = in_float64(*inputs)
    gate, linear = exact[0].chunk(2, -1)
    check([swiglu(*inputs)], inputs, [torch.nn.functional.silu(gate) * linear * (exact[1] if weighted else 1)], exact)


class Same(torch.nn.Module):
    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        return rows, None


def test_megatron_calls_the_kernels() -> None:
    """Megatron's MLP with the kernels equals its own without fusion."""
    from megatron.core.transformer import mlp
    from megatron.core.transformer.transformer_config import TransformerConfig

    from dagrl.workers.megatron.experts import _MlpModule
    from dagrl.workers.megatron.triton_kernels import use_layer_kernels

    sizes = {"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "gated_linear_unit": True}
    config = TransformerConfig(**sizes, activation_func=torch.nn.functional.silu, add_bias_linear=False)
    states, weights = torch.randn(40, 192, device=DEVICE), torch.rand(40, device=DEVICE)
    module = _MlpModule(config, torch.nn.functional.silu, Same(), Same())
    for probabilities in (None, weights):
        expected = mlp.MLP.forward(module, states, probabilities)[0]
        use_layer_kernels(config)
        torch.testing.assert_close(mlp.MLP.forward(module, states, probabilities)[0], expected, rtol=1e-5, atol=1e-6)
        config.bias_activation_fusion = False


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


@pytest.mark.parametrize("size", [1, 300, 9000])
@pytest.mark.parametrize("kept", [False, True], ids=["computed", "kept"])
def test_sums_and_gradients_match_float64(size: int, kept: bool) -> None:
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
