"""Copies in `policy.precision` of the float32 weights of a model that no rank shards: layers compute with them.

FSDP2 would make them layer by layer, through the buffers of its collectives. Imported only where torch is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn


class ComputeCopies:
    """Copies that take the place of a model's parameters from `gather` to `free`, and have memory only then.

    Parameters that have the dtype already stay. The gradient of a copy is added to its parameter's, in float32, as soon as
    a backward pass has computed it.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._places = [place for place in _places(model) if place[2].dtype != dtype]
        self._copies: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight has several places
        for _, _, parameter in self._places:
            if parameter not in self._copies:
                copy = nn.Parameter(torch.empty_like(parameter, dtype=dtype), parameter.requires_grad)
                if parameter.requires_grad:
                    copy.register_post_accumulate_grad_hook(partial(_add_gradient, parameter))  # type: ignore[no-untyped-call]
                self._copies[parameter] = copy
        self._gathered = True
        self.free()

    def gather(self) -> None:
        """Makes the copies and puts them in place, unless they are."""
        if self._gathered:
            return
        for copy in self._copies.values():
            copy.untyped_storage().resize_(copy.nbytes)
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_([*self._copies.values()], [*self._copies])
        for module, name, parameter in self._places:
            module._parameters[name] = self._copies[parameter]
        self._gathered = True

    def free(self) -> None:
        """Puts the parameters back, and frees the memory of the copies."""
        if not self._gathered:
            return
        for module, name, parameter in self._places:
            module._parameters[name] = parameter
        for copy in self._copies.values():
            copy.untyped_storage().resize_(0)
        self._gathered = False


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def _add_gradient(parameter: nn.Parameter, copy: Tensor) -> None:
    assert copy.grad is not None, "autograd has just accumulated it"
    if parameter.grad is None:
        parameter.grad = copy.grad.to(parameter.dtype)
    else:
        parameter.grad += copy.grad
    copy.grad = None
