"""FP8 on one GPU: the kernel against torch on the CPU, a layer against the formats' definition, and whole steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from dagrl.config import Fp8Config
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import MegatronPool
from tests.integration.test_megatron_float8 import FLOAT8
from tests.integration.test_megatron_layouts import UNCLIPPED, case, run_case
from tests.unit.workers.test_float8 import in_float8, one_rank, rounded

pytest.importorskip("megatron.core")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU of compute capability 8.9",
    ),
]
assert one_rank  # a fixture


@pytest.mark.parametrize("kind", ["E4M3", "E5M2"])
@pytest.mark.parametrize("shape", [(1, 16), (37, 48), (256, 192), (1000, 2560)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernel_writes_what_torch_does(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    from dagrl.workers.megatron import float8

    generator = torch.Generator().manual_seed(1)
    matrix = (torch.randn(shape, generator=generator) * torch.logspace(-6, 3, shape[1])).to(dtype)
    form = getattr(float8, kind)
    expected, wide = float8.quantize(matrix, form, columns=True), torch.nn.functional.pad(matrix.cuda(), (3, 5))
    for states in (matrix.cuda(), wide[:, 3:-5], matrix.cuda().t().contiguous().t()):
        found = float8.quantize(states, form, columns=True)
        assert torch.equal(found.scale.cpu(), expected.scale)
        assert torch.equal(found.rows.cpu().float(), expected.rows.float())  # -0 equals 0
        assert torch.equal(found.columns.cpu().float(), expected.columns.float())
    alone = float8.quantize(matrix.cuda(), form, rows=False, columns=True)
    assert not alone.rows.numel() and torch.equal(alone.columns.cpu().float(), expected.columns.float())


def without_ties(matrix: torch.Tensor) -> torch.Tensor:
    """Returns `matrix` in bfloat16 with another largest value, over which none is in the middle of two values of FP8.

    With a peak of 129 units, a middle would need a multiple of 129 of seven units or more: more than eight bits.
    """
    held = matrix.detach().to(torch.bfloat16)
    held.view(-1)[0] = torch.exp2(held.abs().max().float().log2().ceil()) * (129 / 128)
    return held


def multiplied(layer: Any, tokens: int) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Returns inputs [tokens, m], weight [n, m] and upper gradient [tokens, n] of a layer, and its output and gradients."""
    outputs, width = layer.weight.shape
    weight = layer.weight.data = without_ties(layer.weight).cuda()
    inputs = without_ties(torch.randn(tokens, 1, width)).cuda().requires_grad_()
    upper = without_ties(torch.randn(tokens, 1, outputs)).cuda()
    total = layer.weight.main_grad = torch.ones_like(layer.weight, dtype=torch.float32)
    layer.weight.grad_added_to_main_grad = False
    output, _ = layer(inputs)
    output.backward(upper)
    assert inputs.grad is not None and layer.weight.grad_added_to_main_grad
    given = inputs.detach().squeeze(1), weight, upper.squeeze(1)
    return given, (output.detach().squeeze(1), inputs.grad.squeeze(1), total - 1)


def rounded_products(inputs: Tensor, weight: Tensor, upper: Tensor, fp8: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output and the gradients of inputs and weight, of matrices rounded with one scale each."""
    states, held = rounded(inputs, "e4m3"), rounded(weight, "e4m3")
    gradient = rounded(upper, "e5m2" if fp8 == "hybrid" else "e4m3")
    return states @ held.t(), gradient @ held, gradient.t() @ states


@pytest.mark.parametrize("recipe", ["e4m3", "hybrid"])
@pytest.mark.parametrize("tokens", [1, 44, 512])
def test_layers_multiply_rounded_matrices(one_rank: None, recipe: Literal["e4m3", "hybrid"], tokens: int) -> None:
    torch.manual_seed(3)
    given, products = multiplied(in_float8("column", (256, 384), Fp8Config(fp8=recipe)), tokens)
    for found, expected, tolerance in zip(products, rounded_products(*given, recipe), (5e-3, 5e-3, 2e-3), strict=True):
        assert float((found.double() - expected).norm() / expected.norm()) < tolerance


@pytest.fixture(scope="module")
def pool() -> Iterator[MegatronPool]:
    pool = MegatronPool(1)
    yield pool
    pool.close()


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "recorded"])
def test_steps_are_close_to_float32(pool: MegatronPool, tmp_path: Path, graphs: bool) -> None:
    """CPU runs have 0.017 (log-probabilities), 0.40 (gradients), 0.002 and 0.010 (losses), and 0.006 (norm)."""
    model, batch = reference.make_model("qwen3", tmp_path), reference.make_batch()
    config = reference.make_config(model, optimizer=UNCLIPPED)
    truth = reference.train_reference(model, batch, config, reference.sft_reference)
    item = case("qwen3", "single")
    item.megatron.update(FLOAT8, cuda_graphs=graphs)
    assert not reference.beyond_bfloat16(run_case(pool, item, model, precision="bfloat16"), truth, times=8)
