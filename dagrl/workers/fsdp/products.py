"""Products with copies of weights, whose gradients are added to the parameters' float32 gradients within the product.

Otherwise a gradient is rounded to half precision, written, and read again to be added. Imported only where torch is.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dagrl.workers.train.logprobs import add_product, product

parameters_of_copies = WeakValueDictionary[int, nn.Parameter]()
"""The parameter of each gathered copy, by the copy's address: operators of compiled layers have nothing else of it."""


def gradient_sum(copy: Tensor) -> Tensor | None:
    """Returns the float32 sum to which a backward pass may add the gradient of a gathered copy; None of other tensors."""
    parameter = parameters_of_copies.get(copy.data_ptr())
    if not (torch.is_grad_enabled() and copy.requires_grad) or parameter is None or parameter.dtype != torch.float32:
        return None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class AddingLinear(nn.Linear):
    """A linear layer, without a bias, that computes with a copy of its weight."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and inputs.requires_grad and self.weight.requires_grad):
            return linear(inputs, self.weight)
        out: Tensor = _Product.apply(inputs, self.weight)  # type: ignore[no-untyped-call]
        return out


class _Product(torch.autograd.Function):
    """A product whose weight's gradient is not given to autograd."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return linear(inputs, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.ops.dagrl.linear_gradients.default(grad, *ctx.saved_tensors), None


torch.library.define("dagrl::linear_gradients", "(Tensor grad, Tensor inputs, Tensor weight) -> Tensor")


@torch.library.register_fake("dagrl::linear_gradients")  # type: ignore[untyped-decorator]
def _grad_like(grad: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    return inputs.new_empty(inputs.shape)


@torch.library.impl("dagrl::linear_gradients", ("cuda", "cpu"))
def _add_gradient(grad: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """Returns the gradient of `inputs`, and adds the weight's to that of its parameter."""
    parameter, left, right = parameters_of_copies[weight.data_ptr()], grad.flatten(0, -2), inputs.flatten(0, -2)
    if parameter.grad is None:
        parameter.grad = product(left.T, right)
    else:
        add_product(parameter.grad, left.T, right)
    return (left @ weight).view(inputs.shape)
