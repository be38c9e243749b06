"""The reference policy: earlier weights of the policy, kept where `policy.reference_weights` says.

`ReferencePolicy` swaps its weights with the policy's for log-probabilities, tensor by tensor, in the policy's memory.
`device`: a second copy in GPU memory. `host`: a copy in pinned host memory, exchanged in both directions at once, without a
second copy on the GPU. Without a GPU both are a copy in host memory. Imported only where torch is.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

ReferencePlacement = Literal["host", "device"]
Parameters = Mapping[str, Tensor]
"""The policy's weights: parameters, and buffers that training changes."""

IN_FLIGHT = 2  # tensors in transfer


class ReferencePolicy:
    """Reference weights by parameter name. `tensors` holds them except while they are swapped in."""

    def __init__(self, weights: Mapping[str, Tensor], where: ReferencePlacement, device: torch.device) -> None:
        self.where = where
        self.tensors = {name: _placed(tensor, where, device) for name, tensor in weights.items()}

    @contextmanager
    def in_place_of(self, policy: Parameters) -> Iterator[None]:
        """Gives `policy` the reference's weights for the block; afterwards it has its own, in the original memory."""
        exchange = _exchange if self.where == "host" and next(iter(policy.values())).is_cuda else _swap
        exchange(policy, self.tensors)
        try:
            yield
        finally:
            exchange(policy, self.tensors)


def _placed(tensor: Tensor, where: ReferencePlacement, device: torch.device) -> Tensor:
    """Copies a tensor to the device or to pinned host memory."""
    if where == "device" or device.type == "cpu":
        return tensor.detach().to(device, copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach())


def _swap(policy: Parameters, reference: Mapping[str, Tensor]) -> None:
    """Swaps contents in one memory."""
    for name, parameter in policy.items():
        own = parameter.data.clone()
        parameter.data.copy_(reference[name])
        reference[name].copy_(own)


def _exchange(policy: Parameters, reference: Mapping[str, Tensor]) -> None:
    """Swaps contents between device and host. Each direction has its own stream; the current stream waits for both."""
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
        storing.wait_stream(loading)  # read the host tensor before it is overwritten
        with torch.cuda.stream(storing):
            host.copy_(parameter.data, non_blocking=True)
            parameter.data.copy_(incoming)
        buffer.emptied = storing.record_event()
    current.wait_stream(storing)


class _Buffer:
    """Device memory for one incoming tensor. `emptied` is the event after the previous one left."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.emptied: torch.cuda.Event | None = None

    def like(self, tensor: Tensor) -> Tensor:
        """Returns the start of the buffer as a tensor of that shape."""
        return self._bytes[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
