"""Copies of weights in `policy.precision`, and host copies of tensors saved for backward. Imported only where torch is.

Layers of a model that no rank shards compute with such copies of its float32 weights. FSDP2 would make them layer by layer,
through the buffers of its collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

LEAST_BYTES = 1 << 20  # smaller tensors stay on the GPU
LEAST_ADDED = 1 << 20  # numbers of a gradient, from which on our kernel takes less time than torch's
JOINT = "joint"


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class _Copy:
    """A saved tensor in host memory. `_device` is set while it is on its way back, and `_ready` says when it has arrived."""

    def __init__(self, tensor: Tensor, group: list[_Copy]) -> None:
        self._stream, self._from, self.group = _copy_stream(tensor.device), tensor.device, group
        pinned = self._stream is not None
        self._host = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=pinned)
        self._device: Tensor | None = None
        self._ready: torch.cuda.Event | None = None
        if self._stream is None:
            self._host.copy_(tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)

    def fetch(self) -> None:
        """Starts the copy back, unless it has started."""
        if self._device is not None or self._stream is None:
            return
        self._device = torch.empty_strided(self._host.size(), self._host.stride(), dtype=self._host.dtype, device=self._from)
        self._stream.wait_stream(torch.cuda.current_stream())  # the memory may still be in use
        with torch.cuda.stream(self._stream):
            self._device.copy_(self._host, non_blocking=True)
            self._ready = self._stream.record_event()

    def take(self) -> Tensor:
        """Returns the tensor, for kernels of the current stream."""
        self.fetch()
        if self._device is None or self._ready is None:
            return self._host
        torch.cuda.current_stream().wait_event(self._ready)
        tensor, self._device = self._device, None
        return tensor


class HostCopies:
    """Runs a layer's forward pass with its saved tensors in host memory. `before` is the layer that runs before it.

    `torch.autograd.graph.save_on_cpu` waits for each copy and takes weights along. Here copies have a stream of their own: a
    layer's tensors leave while the next layer runs, and return while the layer after it runs backward.
    """

    def __init__(self, layer: nn.Module, forward: Callable[..., Any], before: HostCopies | None) -> None:
        self._layer, self._forward, self._before = layer, forward, before
        self._group: list[_Copy] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weights = (one.to_local() if isinstance(one, DTensor) else one for one in self._layer.parameters())
        shared = (one for one in tree_leaves((args[1:], kwargs)) if type(one) is Tensor)  # by all layers: rotations, masks
        staying = {one.untyped_storage().data_ptr() for one in (*weights, *shared)}
        self._group = []
        with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, self._group, staying), self._unpack):
            return self._forward(*args, **kwargs)

    def _pack(self, group: list[_Copy], staying: set[int], tensor: Tensor) -> Tensor | _Copy:
        small = tensor.nbytes < LEAST_BYTES or 0 in tensor.stride()
        if type(tensor) is not Tensor or small or tensor.untyped_storage().data_ptr() in staying:
            return tensor
        group.append(_Copy(tensor, group))
        return group[-1]

    def _unpack(self, saved: Tensor | _Copy) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        for copy in saved.group:
            copy.fetch()
        tensor = saved.take()
        saved.group.remove(saved)
        if self._before is not None:
            for copy in self._before._group:
                copy.fetch()
        return tensor


class ComputeCopies:
    """Copies that take the place of a model's parameters from `gather` to `free`, and have memory only then.

    Parameters that have the dtype already stay. Weights of the submodules that a module names in `joined_weights` are rows
    of one copy, the module's parameter `JOINT`. Gradients of copies are added up in float32, as soon as a backward pass has
    computed them. A first one waits for the second, or for `free`, in the dtype of the copy.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.first_gradients: dict[nn.Parameter, Tensor] = {}
        self._places = [*_places(model, dtype)]
        self._copies = dict[tuple[nn.Parameter, ...], nn.Parameter]()  # a tied weight has several places
        for _, _, parameters in self._places:
            if parameters not in self._copies:
                self._copies[parameters] = self._copy(parameters, dtype)
        self._parts = [part for parameters, copy in self._copies.items() for part in _parts(copy.detach(), parameters)]
        self._gathered = True
        self.free()

    def _copy(self, parameters: tuple[nn.Parameter, ...], dtype: torch.dtype) -> nn.Parameter:
        empty = [torch.empty_like(parameter, dtype=dtype) for parameter in parameters]
        copy = nn.Parameter(torch.cat(empty) if empty[1:] else empty[0], parameters[0].requires_grad)
        if copy.requires_grad:
            copy.register_post_accumulate_grad_hook(partial(self._add_gradients, parameters))  # type: ignore[no-untyped-call]
        return copy

    def gather(self) -> None:
        """Makes the copies and puts them in place, unless they are."""
        if self._gathered:
            return
        for copy in self._copies.values():
            copy.untyped_storage().resize_(copy.nbytes)
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(self._parts, [*chain(*self._copies)])
        for module, name, parameters in self._places:
            module._parameters[name] = self._copies[parameters]
        self._gathered = True

    def free(self) -> None:
        """Puts the parameters back, frees the memory of the copies, and leaves all gradients to the parameters."""
        if not self._gathered:
            return
        for module, name, parameters in self._places:
            module._parameters[name] = None if name == JOINT else parameters[0]
        for copy in self._copies.values():
            copy.untyped_storage().resize_(0)
        while self.first_gradients:  # one by one, as each gets twice as large
            parameter, grad = self.first_gradients.popitem()
            parameter.grad = grad.to(parameter.dtype)
        self._gathered = False

    def _add_gradients(self, parameters: tuple[nn.Parameter, ...], copy: Tensor) -> None:
        grads, copy.grad = copy.grad, None
        assert grads is not None, "autograd has just accumulated it"
        for parameter, grad in zip(parameters, _parts(grads, parameters), strict=True):
            total = parameter.grad if parameter.grad is not None else self.first_gradients.pop(parameter, None)
            if total is None:
                self.first_gradients[parameter] = grad
            else:
                parameter.grad = _sum(total, grad)


def _places(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, str, tuple[nn.Parameter, ...]]]:
    """Yields modules, names of their parameters that copies replace, and whose rows each copy has."""
    joined = set[nn.Parameter]()
    for module in model.modules():  # before its children
        if names := getattr(module, "joined_weights", ()):
            weights: tuple[nn.Parameter, ...] = tuple(getattr(module, name).weight for name in names)
            joined.update(weights)
            yield module, JOINT, weights
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype != dtype and parameter not in joined:
                yield module, name, (parameter,)


def _parts(joint: Tensor, parameters: tuple[nn.Parameter, ...]) -> Sequence[Tensor]:
    """Returns the rows of each of the parameters."""
    return torch.split(joint, [*map(len, parameters)]) if parameters[1:] else (joint,)


def _sum(total: Tensor, grad: Tensor) -> Tensor:
    """Returns the float32 sum, in `total` if it is float32."""
    if grad.is_cuda and grad.numel() >= LEAST_ADDED and total.is_contiguous() and grad.is_contiguous():
        from dagrl.workers.fsdp.kernels import add

        return add(total, grad)
    return total.float().add_(grad)
