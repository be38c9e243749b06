"""FP8 products against quantization written out from the formats' definition, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from dagrl.config import Fp8Config
from dagrl.errors import ConfigError
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron import cpu

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core")

FORMATS = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}  # bits of the mantissa, least exponent, largest value


def rounded(matrix: Tensor, form: str) -> Tensor:
    """Returns `matrix` with the values that the format can hold, scaled so that the largest is the format's."""
    mantissa, least, largest = FORMATS[form]
    scale = matrix.double().abs().max() / largest
    values = matrix.double() / scale
    _, exponent = torch.frexp(values)  # 2 ** (exponent - 1) <= |value| < 2 ** exponent
    step = torch.exp2((exponent - 1).clamp(min=least).double() - mantissa)
    return torch.round(values / step) * step * scale  # ties to even, as in IEEE 754


@pytest.mark.parametrize("form", FORMATS)
def test_values_are_those_of_the_format(form: str) -> None:
    from dagrl.workers.megatron.float8 import E4M3, E5M2, quantize

    matrix = torch.randn(37, 48, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 48)
    found = quantize(matrix, {"e4m3": E4M3, "e5m2": E5M2}[form], columns=True)
    expected = rounded(matrix, form)
    torch.testing.assert_close(found.rows.double() * found.scale.double(), expected, rtol=1e-6, atol=0)
    assert found.columns.shape == (48, 48)
    torch.testing.assert_close(found.columns.double()[:, :37].t() * found.scale.double(), expected, rtol=1e-6, atol=0)
    assert not found.columns.double()[:, 37:].any()


@pytest.fixture
def one_rank() -> Iterator[None]:
    cpu.adapt()
    from tests.unit.workers.megatron_models import rank_of

    with rank_of(ParallelLayout(), 0):
        yield


def in_float8(kind: str, sizes: tuple[int, int], settings: Fp8Config, products: Any = None) -> Any:
    """Returns a linear layer in the place of one of a model's. `products`: torch's unless others are given."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from dagrl.workers.megatron.float8 import TensorwiseProducts, use_float8

    config = TransformerConfig(num_layers=1, hidden_size=48, num_attention_heads=2, use_cpu_initialization=True)
    options = {"config": config, "init_method": partial(torch.nn.init.normal_, std=0.2), "bias": False}
    layer = (
        ColumnParallelLinear(*sizes, **options)
        if kind == "column"
        else RowParallelLinear(*sizes, **options, input_is_parallel=True, skip_bias_add=False)
    )
    model = torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList([layer])
    use_float8(model, settings, products or TensorwiseProducts(settings))
    return layer


@pytest.mark.parametrize("recipe", ["e4m3", "hybrid"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_layers_multiply_rounded_matrices(one_rank: None, kind: str, recipe: Literal["e4m3", "hybrid"]) -> None:
    torch.manual_seed(3)  # no value near the middle of two others, where float32 and float64 may round apart
    inputs, upper = torch.randn(7, 3, 48, requires_grad=True), torch.randn(7, 3, 32)
    layer = in_float8(kind, (48, 32), Fp8Config(fp8=recipe))
    output, _ = layer(inputs)
    output.backward(upper)
    layer.weight.main_grad, layer.weight.grad_added_to_main_grad = torch.ones_like(layer.weight), False
    layer(inputs.detach())[0].backward(upper)

    form = "e5m2" if recipe == "hybrid" else "e4m3"
    states, weight, gradient = rounded(inputs.detach(), "e4m3"), rounded(layer.weight.detach(), "e4m3"), rounded(upper, form)
    of_weight = gradient.flatten(0, 1).t() @ states.flatten(0, 1)
    assert inputs.grad is not None
    found = output, inputs.grad, layer.weight.main_grad - 1
    for value, expected in zip(found, (states @ weight.t(), gradient @ weight, of_weight), strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    assert layer.weight.grad_added_to_main_grad


def test_a_matrix_of_zeros_stays_zero(one_rank: None) -> None:
    layer = in_float8("column", (48, 32), Fp8Config())
    inputs = torch.zeros(2, 1, 48, requires_grad=True)
    output, _ = layer(inputs)
    output.backward(torch.zeros_like(output))
    assert inputs.grad is not None and not output.any() and not inputs.grad.any() and not layer.weight.grad.any()


def test_values_that_are_not_finite_stay_so(one_rank: None) -> None:
    layer = in_float8("column", (48, 32), Fp8Config())
    inputs = torch.ones(2, 1, 48)
    for value in (torch.inf, torch.nan):
        inputs[1, 0, 5] = value
        assert not layer(inputs)[0][1].isfinite().any()


def test_sizes_that_are_no_multiple_of_16_are_refused(one_rank: None) -> None:
    with pytest.raises(ConfigError, match=r"fp8_cfg.enabled is true, and the weight of decoder.layers.0 is \[40, 48\]"):
        in_float8("column", (48, 40), Fp8Config())
