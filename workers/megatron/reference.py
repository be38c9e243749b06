"""The reference policy's weights, kept beside the policy's, and put in their place for log-probabilities.

`device`: a second copy lies in GPU memory, and parameters point at it meanwhile. `host`: it lies in pinned host memory and
changes places with the policy's weights, tensor by tensor, in both directions at once; no second copy on the GPU. Without a
GPU both are a copy that parameters point at. Imported only where torch is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

Where = Literal["host", "device"]
Parameters = Mapping[str, torch.nn.Parameter]

IN_FLIGHT = 2  # tensors on their way


class ReferencePolicy:
    """Reference weights by the names of the policy's parameters; `tensors` are they, while none are swapped in."""

    def __init__(self, weights: Mapping[str, Tensor], where: Where, device: torch.device) -> None:
        self.where = where
        self.tensors = {name: _placed(tensor, where, device) for name, tensor in weights.items()}

    @contextmanager
    def in_place_of(self, policy: Parameters) -> Iterator[None]:
        """Let `policy` hold the reference's weights; afterwards it holds its own, in the memory where they were."""
        swap = self.where == "host" and next(iter(policy.values())).is_cuda
        with _exchanged(policy, self.tensors) if swap else _pointed_at(policy, self.tensors):
            yield


def _placed(tensor: Tensor, where: Where, device: torch.device) -> Tensor:
    """A copy on the device, or in host memory that it copies from fast."""
    if where == "device" or device.type == "cpu":
        return tensor.detach().to(device, copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach())


@contextmanager
def _pointed_at(policy: Parameters, reference: Mapping[str, Tensor]) -> Iterator[None]:
    kept = {name: parameter.data for name, parameter in policy.items()}
    try:
        for name, parameter in policy.items():
            parameter.data = reference[name]
        yield
    finally:
        for name, parameter in policy.items():
            parameter.data = kept[name]


@contextmanager
def _exchanged(policy: Parameters, reference: Mapping[str, Tensor]) -> Iterator[None]:
    _exchange(policy, reference)
    try:
        yield
    finally:
        _exchange(policy, reference)


def _exchange(policy: Parameters, reference: Mapping[str, Tensor]) -> None:
    """Swap contents. Copies to and from the device run on streams of their own; the current stream waits for them."""
    current = torch.cuda.current_stream()
    loading, storing = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    buffers = [_Buffer(max(tensor.nbytes for tensor in reference.values()), current.device) for _ in range(IN_FLIGHT)]
    for stream in (loading, storing):
        stream.wait_stream(current)
    for number, (name, parameter) in enumerate(policy.items()):
        host, buffer = reference[name], buffers[number % IN_FLIGHT]
        if buffer.emptied is not None:
            loading.wait_event(buffer.emptied)
        incoming = buffer.like(host)
        with torch.cuda.stream(loading):
            incoming.copy_(host, non_blocking=True)
        storing.wait_stream(loading)  # what is read has to be read before it is overwritten
        with torch.cuda.stream(storing):
            host.copy_(parameter.data, non_blocking=True)
            parameter.data.copy_(incoming)
        buffer.emptied = storing.record_event()
    current.wait_stream(storing)


class _Buffer:
    """Device memory for one tensor on its way in; `emptied` is when the last one had left."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.emptied: torch.cuda.Event | None = None

    def like(self, tensor: Tensor) -> Tensor:
        """The start of the buffer as a tensor of that shape."""
        return self._bytes[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
