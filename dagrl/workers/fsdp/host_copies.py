"""Keeps what a layer saves for its backward pass in host memory, copied while other layers compute.

`torch.autograd.graph.save_on_cpu` waits for each copy and takes weights along. Here copies have a stream of their own: a
layer's tensors leave while the next layer runs, and return while the layer after it runs backward. Imported only where
torch is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

LEAST_BYTES = 1 << 20
"""Smaller tensors stay on the GPU."""


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
    """Runs a layer's forward pass with its saved tensors in host memory. `before` is the layer that runs before it."""

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
