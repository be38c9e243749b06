"""The interface of a channel, which moves tensors between workers outside Ray's object store.

A channel joins ranks of different worker groups and is independent of their process groups. Call it from one thread at a
time; only `abort` may come from any. Messages between two ranks arrive in the order sent. Both sides know dtype and size
beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, Protocol

from dagrl.errors import ChannelError
from dagrl.runtime.store import open_tcp_store

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

ChannelKind = Literal["gloo", "nccl", "ipc"]

MAILBOX_SLOTS = 2
"""Messages that a mailbox of an IPC channel holds (`ipc.py`): one is written while another is read."""


@dataclass(frozen=True)
class ChannelSpec:
    """How to open one rank's end. `address` is a free `host:port` on the host of rank 0, which serves the rendezvous there.

    `timeout_s` limits the opening and every wait, in seconds. Raises ChannelError for a malformed address or rank.
    """

    kind: ChannelKind
    address: str
    rank: int
    size: int
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise ChannelError(f"the channel address is {self.address!r}; expected host:port")
        if not 0 <= self.rank < self.size:
            raise ChannelError(f"the channel rank is {self.rank}; expected 0 to {self.size - 1}")

    def __str__(self) -> str:
        """Returns this rank's end as errors name it."""
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
        """`timeout_s` as torch takes it."""
        return timedelta(seconds=self.timeout_s)


class PendingMessage(Protocol):
    """A message that is being sent or received."""

    def wait(self) -> None:
        """Returns when the message's tensor may be used: on the host for Gloo and IPC, on the current stream for NCCL.

        Raises ChannelError that names the peer if the channel broke, was aborted or passed its deadline.
        """


class Channel(Protocol):
    """One rank's end of a channel."""

    spec: ChannelSpec

    def send(self, tensor: torch.Tensor, peer: int) -> PendingMessage:
        """Sends `tensor`, which must not change before the wait."""

    def receive(self, tensor: torch.Tensor, peer: int) -> PendingMessage:
        """Receives into `tensor`, which must have the message's size."""

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> Sequence[PendingMessage]:
        """Posts several messages `(tensor, peer)` at once, as one group if the backend has groups.

        The peer must post all messages of one call in one call as well, in the same order.
        """

    def guarded(self) -> AbstractContextManager[None]:
        """Aborts the channel if the block, which launches work and messages, takes longer than the deadline."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records what `work` posts, waits for and launches; returns a function that repeats it in one launch if possible.

        Recording executes nothing. `work` must have run before, must use only memory that stays allocated, and must not
        wait on the host. The returned function is valid as long as the channel is open.
        """

    def agree(self, refusal: str = "", *, wait: bool = True) -> None:
        """Votes that this rank is done, and returns when all ranks have voted; without `wait`, at once.

        With a `refusal` it votes against, for that reason, and returns; the others raise ChannelError with the reason. The
        channel stays usable, so a rank may only refuse when none of its messages is pending; otherwise it must abort. All
        ranks must call this equally often, in the same order. Raises ChannelError if a rank refused, aborted, died or did
        not vote within the deadline.
        """

    def release(self) -> None:
        """Frees memory that is kept between messages, once peers no longer map it. The next message allocates it again."""

    def synchronize(self) -> None:
        """Blocks the host until all messages that were waited for are complete, at most until the deadline."""

    def abort(self, reason: str) -> None:
        """Breaks the channel, from any thread: this rank and its peers raise ChannelError instead of waiting."""

    def close(self) -> None:
        """Frees everything. May be called twice."""


def wait_all(pending: Sequence[PendingMessage]) -> None:
    """Waits for several messages. Messages of one group may share one object."""
    for message in dict.fromkeys(pending):
        message.wait()


def check_message(spec: ChannelSpec, tensor: torch.Tensor, peer: int, device: str) -> None:
    """Raises ChannelError if a channel cannot send or receive `tensor`."""
    if not 0 <= peer < spec.size or peer == spec.rank:
        raise ChannelError(f"rank {spec.rank} of a channel of {spec.size} has no peer {peer}")
    if tensor.device.type != device:
        raise ChannelError(f"a {spec.kind} channel moves {device} tensors, but this one is on {tensor.device}")
    if not tensor.is_contiguous():
        raise ChannelError(f"a channel moves contiguous tensors, but this one has strides {tensor.stride()}; pack it first")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor as a vector of bytes over the same memory."""
    import torch

    flat = tensor.detach().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element is contiguous with any stride


def open_store(spec: ChannelSpec) -> Store:
    """Opens the channel's store, which rank 0 serves; returns when all ranks are connected. Raises ChannelError."""
    try:
        return open_tcp_store(spec.host, spec.port, spec.size, serves=spec.rank == 0, timeout=spec.timeout)
    except RuntimeError as error:  # torch's DistError is one
        raise cannot_join(spec, error) from error


def cannot_join(spec: ChannelSpec, error: Exception) -> ChannelError:
    """Returns the error of a rank that could not open its end."""
    return ChannelError(
        f"{spec.kind} channel at {spec.address}: rank {spec.rank} of {spec.size} could not join within {spec.timeout_s} s: "
        f"{error}; every rank must open its end, and the address must be free on the host of rank 0"
    )
