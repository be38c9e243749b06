"""What a channel is: a way for tensors to go from one worker to another outside the object store.

A channel joins ranks of different worker groups and stands beside the process groups that they already have. All calls of
one rank come from one thread at a time; `abort` may come from any. Messages between two ranks arrive in the order sent;
both sides know dtype and size beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, Protocol

from dagrl.errors import ChannelError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

MAILBOX_SLOTS = 2
"""Messages that a mailbox holds, of a channel that has them (`ipc.py`): one is written while another is read."""


@dataclass(frozen=True)
class ChannelSpec:
    """How to open one rank's end: `address` is `host:port`, free on the host of rank 0, which serves the rendezvous there.

    Opening and every wait take at most `timeout_s` seconds.
    """

    kind: Literal["gloo", "nccl", "ipc"]
    address: str
    rank: int
    size: int
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise ChannelError(f"channel address {self.address!r} is not host:port")
        if not 0 <= self.rank < self.size:
            raise ChannelError(f"channel rank {self.rank} is outside a channel of {self.size}")

    def __str__(self) -> str:
        """This rank's end, as errors name it."""
        return f"{self.kind} channel rank {self.rank} of {self.size} ({self.address})"

    @property
    def host(self) -> str:
        """Host part of the address."""
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        """Port part of the address."""
        return int(self.address.rpartition(":")[2])

    @property
    def timeout(self) -> timedelta:
        """The deadline as torch takes it."""
        return timedelta(seconds=self.timeout_s)


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Return when the message's tensor may be used: on the host for Gloo, on the current stream for NCCL.

        Raises ChannelError naming the peer when the channel broke, was aborted or passed its deadline.
        """


class Channel(Protocol):
    """One rank's end of a channel."""

    spec: ChannelSpec

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        """Send `tensor`, which must not change before the wait."""

    def receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        """Receive into `tensor`; it has the message's size when the wait is over."""

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> Sequence[Pending]:
        """Post several messages at once, `(tensor, peer)` each; one group where the backend has groups.

        Several to one peer must be posted there at once as well, in the same order.
        """

    def guarded(self) -> AbstractContextManager[None]:
        """The block, which launches work around messages, has the deadline: after it the channel is aborted."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` posts, waits for and launches, and return what does it again: at once, where the backend can.

        Nothing has happened yet when this returns. `work` must have run before, use only memory that stays, and not wait on
        the host. What is returned lives as long as the channel.
        """

    def agree(self, refusal: str = "", *, wait: bool = True) -> None:
        """Say that this rank has done its part of something, and return when all ranks have said so.

        With a `refusal` it says why it cannot, and returns: the others get a ChannelError with it. The channel stays usable:
        so only a rank whose messages have all gone and come may refuse, any other aborts. Without `wait` it returns at
        once. All ranks must call this for the same things, in the same order. Raises ChannelError when a rank refused,
        aborted, died or did not come within the deadline.
        """

    def release(self) -> None:
        """Give back memory that is kept from message to message, as far as peers let go of it; the next takes it again."""

    def synchronize(self) -> None:
        """Return when all that was waited for has happened, as seen from the host; at most the deadline."""

    def abort(self, reason: str) -> None:
        """From any thread: break the channel, so that this rank and its peers get ChannelError instead of waiting."""

    def close(self) -> None:
        """Give everything back; may be called twice."""


def wait_all(pending: Sequence[Pending]) -> None:
    """Wait for several messages; those of one group may be one and the same."""
    for message in dict.fromkeys(pending):
        message.wait()


def check_message(spec: ChannelSpec, tensor: torch.Tensor, peer: int, device: str) -> None:
    """Raise ChannelError for what no channel can carry."""
    if not 0 <= peer < spec.size or peer == spec.rank:
        raise ChannelError(f"rank {spec.rank} of a channel of {spec.size} has no peer {peer}")
    if tensor.device.type != device:
        raise ChannelError(f"a {spec.kind} channel carries {device} tensors; this one is on {tensor.device}")
    if not tensor.is_contiguous():
        raise ChannelError(f"a channel carries contiguous tensors; this one has strides {tensor.stride()}: pack it first")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a vector of bytes over the same memory."""
    import torch

    flat = tensor.detach().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element is contiguous whatever its stride


def open_store(spec: ChannelSpec) -> Store:
    """The channel's own store, served by rank 0; returns when all ranks are connected. Raises ChannelError."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        return TCPStore(spec.host, spec.port, spec.size, spec.rank == 0, timeout=spec.timeout)
    except RuntimeError as error:  # torch's DistError is one
        raise cannot_join(spec, error) from error


def cannot_join(spec: ChannelSpec, error: Exception) -> ChannelError:
    """The error of a rank that could not open its end."""
    return ChannelError(
        f"{spec.kind} channel at {spec.address}: rank {spec.rank} of {spec.size} could not join within {spec.timeout_s} s: "
        f"{error}; every rank must open its end, and the address must be free on the host of rank 0"
    )


def open_channel(spec: ChannelSpec) -> Channel:
    """Open this rank's end; returns when all ranks have.

    Raises ChannelError when some rank does not come within the deadline, MissingDependencyError when the backend's package
    is not installed.
    """
    if spec.kind == "gloo":
        from dagrl.channels.gloo import GlooChannel

        return GlooChannel(spec)
    if spec.kind == "nccl":
        from dagrl.channels.nccl import NcclChannel

        return NcclChannel(spec)
    if spec.kind == "ipc":
        from dagrl.channels.ipc import IpcChannel

        return IpcChannel(spec)
    raise ChannelError(f"channel kind {spec.kind!r} is unknown; there are 'gloo', 'nccl' and 'ipc'")
