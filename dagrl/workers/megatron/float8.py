"""Linear layers whose products are of FP8 matrices, forward and backward: Megatron's recipes `tensorwise` and `blockwise`.

`TensorwiseProducts` are torch's; Transformer Engine has both recipes (`dagrl.workers.megatron.kernels`). With `tensorwise`
each matrix is divided by a scale that brings its largest value to the format's ("current scaling" in Transformer Engine).
Activations and weights are in E4M3, gradients in E4M3 or E5M2 (`hybrid`; arXiv:2209.05433). Weights keep their precision
and are quantized for each microbatch, so the optimizer, checkpoints and refits are those of other precisions. A layer keeps
its input in FP8 for the backward pass. Imported only where Megatron is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import pad

from dagrl.config import Fp8Config
from dagrl.config.kernel_checks import check_float8
from dagrl.errors import ConfigError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENTS = {"e4m3": E4M3, "hybrid": E5M2}
MULTIPLE = 16  # of the sizes of a matrix that cuBLAS takes
SMALLEST_SCALE = 1e-30  # of a matrix of zeros


class Quantized(NamedTuple):
    """A matrix over its `scale`, a float32 number on the device: as `rows` [n, m] and as `columns` [m, n].

    `columns` has zeros up to a multiple of 16 of n.
    """

    rows: Tensor
    columns: Tensor
    scale: Tensor


class Kept(NamedTuple):
    """Tensors saved for backward, and the `form` in which Transformer Engine restores them."""

    tensors: Sequence[Any]
    form: Any = None


class Products(Protocol):
    """The three products of a linear layer in FP8. Both sizes of a weight must be multiples of `multiple`."""

    multiple: int

    def output(self, states: Tensor, weight: Tensor, trained: bool) -> tuple[Tensor, Kept]:
        """Multiplies `states` [tokens, m] by the transpose of `weight` [n, m] -> [tokens, n]."""

    def gradient(self, upper: Tensor, trained: bool) -> Any:
        """Quantizes the gradient of the output [tokens, n] for the two products below; `trained`: for both."""

    def of_inputs(self, upper: Any, weight: Tensor, kept: Kept, dtype: torch.dtype) -> Tensor:
        """Returns the gradient of `states`."""

    def add_of_weight(self, total: Tensor, upper: Any, kept: Kept) -> None:
        """Adds the gradient of `weight` to `total` [n, m]."""


class TensorwiseProducts:
    """Torch's products of matrices with one scale each."""

    multiple = MULTIPLE

    def __init__(self, settings: Fp8Config) -> None:
        self._gradients = GRADIENTS[settings.fp8]

    def output(self, states: Tensor, weight: Tensor, trained: bool) -> tuple[Tensor, Kept]:
        """See `Products`."""
        inputs, weights = quantize(states, E4M3, columns=trained), quantize(weight, E4M3)
        output = product(inputs.rows, weights.rows, inputs.scale, weights.scale, states.dtype, fast=True)
        return output, Kept((inputs.columns, inputs.scale, weights.scale))

    def gradient(self, upper: Tensor, trained: bool) -> Quantized:
        """See `Products`."""
        return quantize(upper, self._gradients, columns=trained)

    def of_inputs(self, upper: Quantized, weight: Tensor, kept: Kept, dtype: torch.dtype) -> Tensor:
        """See `Products`."""
        weights = quantize(weight, E4M3, rows=False, columns=True, scale=kept.tensors[2])
        return product(upper.rows, weights.columns, upper.scale, weights.scale, dtype)

    def add_of_weight(self, total: Tensor, upper: Quantized, kept: Kept) -> None:
        """See `Products`."""
        columns, scale, _ = kept.tensors
        total.add_(product(upper.columns, columns, upper.scale, scale, total.dtype))


def use_float8(model: torch.nn.Module, settings: Fp8Config, products: Products) -> None:
    """Makes the linear layers of a model's decoder compute by `products`. Routers and grouped experts are not among them.

    Raises ConfigError if the GPU has no FP8, or for a weight whose size is not a multiple of `products.multiple`.
    """
    if torch.cuda.is_available():
        check_float8(settings.fp8_recipe, torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    for name, layer in model.named_modules():
        linear = isinstance(layer, ColumnParallelLinear | RowParallelLinear) and name.startswith("decoder.layers.")
        if not linear or ".local_experts." in name:
            continue
        if any(size % products.multiple for size in layer.weight.shape):
            raise ConfigError(
                f"policy.megatron_cfg.fp8_cfg.enabled is true, and the weight of {name} is {list(layer.weight.shape)} "
                f"on this worker: {settings.fp8_recipe} products need multiples of {products.multiple}. Set it to false, or "
                "choose a smaller tensor_model_parallel_size"
            )
        layer._forward_impl = partial(_forward, products)


def _forward(
    products: Products,
    input: Tensor,  # Megatron's names
    weight: Tensor,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None,
    **_: Any,
) -> Tensor:
    trained = torch.is_grad_enabled() and weight.requires_grad
    group = tp_group if allreduce_dgrad or sequence_parallel else None
    output: Tensor = _Float8Linear.apply(input, weight, products, trained, group, sequence_parallel)  # type: ignore[no-untyped-call]
    return output if bias is None else output + bias


class _Float8Linear(torch.autograd.Function):
    """`inputs` [..., m] times `weight` [n, m] -> [..., n]. The gradient of `inputs` is summed over `group`.

    With `split` this worker has its part of `inputs` along dimension 0, and the output has all of it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        products: Products,
        trained: bool,
        group: dist.ProcessGroup | None,
        split: bool,
    ) -> Tensor:
        whole = gather_from_sequence_parallel_region(inputs, group=group) if split else inputs
        output, kept = products.output(whole.flatten(0, -2), weight, trained)
        ctx.save_for_backward(weight, *kept.tensors)
        ctx.form, ctx.products, ctx.group, ctx.split, ctx.shape = kept.form, products, group, split, whole.shape
        return output.view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, *tensors = ctx.saved_tensors
        kept, products, trained = Kept(tensors, ctx.form), ctx.products, ctx.needs_input_grad[1]
        upper = products.gradient(grads[0].flatten(0, -2), trained)
        of_inputs = products.of_inputs(upper, weight, kept, grads[0].dtype).view(ctx.shape)
        of_inputs, reduction = _start_sum(of_inputs, ctx.group, ctx.split)
        of_weight = _weight_gradient(products, upper, weight, kept) if trained else None
        if reduction is not None:
            reduction.wait()
        return of_inputs, of_weight, None, None, None, None


def _start_sum(gradient: Tensor, group: dist.ProcessGroup | None, split: bool) -> tuple[Tensor, dist.Work | None]:
    """Starts to sum the gradient over the group, if there is one; with `split` this worker gets its part of it."""
    if group is None:
        return gradient, None
    if not split:
        return gradient, dist.all_reduce(gradient, group=group, async_op=True)
    part = gradient.new_empty(len(gradient) // group.size(), *gradient.shape[1:])
    return part, dist.reduce_scatter_tensor(part, gradient, group=group, async_op=True)


def _weight_gradient(products: Products, upper: Any, weight: Any, kept: Kept) -> Tensor:
    """Returns the gradient, or adds it to Megatron's buffer, as with `gradient_accumulation_fusion`."""
    total: Tensor | None = getattr(weight, "main_grad", None)
    if total is None:
        gradient = torch.zeros_like(weight)
        products.add_of_weight(gradient, upper, kept)
        return gradient
    products.add_of_weight(total, upper, kept)
    weight.grad_added_to_main_grad = True  # Megatron then drops the weight's own gradient
    return torch.empty_like(weight)


def product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Multiplies quantized `left` [n, k] by the transpose of `right` [m, k] -> [n, m] in `dtype`.

    `fast` sums in less than float32 on some GPUs, which Transformer Engine does in forward products alone, too.
    """
    result: Tensor = torch._scaled_mm(
        left, right.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=fast
    )
    return result


def quantize(
    matrix: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = False, scale: Tensor | None = None
) -> Quantized:
    """Quantizes `matrix` [n, m] as `rows`, `columns` or both; what is left out is empty. No `scale`: that of the peak."""
    if scale is None:
        peak = torch.linalg.vector_norm(matrix, math.inf, dtype=torch.float32)
        largest = peak.new_full((), torch.finfo(dtype).max)  # a number would be a factor of 1 / number on GPUs, inexact
        scale = (peak / largest).clamp_(min=SMALLEST_SCALE)
    length = -(-len(matrix) // MULTIPLE) * MULTIPLE
    if matrix.is_cuda and matrix.dtype != torch.float32:  # as Triton 3.6 compiles it, columns of float32 are wrong
        from dagrl.workers.megatron.triton_kernels import quantize_to

        quantized = matrix.new_empty(matrix.shape if rows else (0,), dtype=dtype)
        transposed = matrix.new_empty((matrix.shape[1], length) if columns else (0,), dtype=dtype)
        quantize_to(quantized, transposed, matrix, scale)
        return Quantized(quantized, transposed, scale)
    values = pad(matrix.float() * (1 / scale), (0, 0, 0, length - len(matrix)))
    quantized = values[: len(matrix) if rows else 0].to(dtype)
    return Quantized(quantized, values[:, : matrix.shape[1] if columns else 0].t().contiguous().to(dtype), scale)
