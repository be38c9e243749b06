"""The interface of a channel, which moves tensors between workers outside Ray's object store.

A channel joins ranks of different worker groups and is independent of their process groups. Call it from one thread at a
time; only `abort` may come from any. Messages between two ranks arrive in the order sent. Both sides know dtype and size
beforehand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from dagrl.channels.agreement import Agreement
from dagrl.channels.spec import ChannelSpec, open_store
from dagrl.errors import ChannelError

if TYPE_CHECKING:
    import torch

MAILBOX_SLOTS = 2  # messages that a mailbox of an IPC channel holds (`ipc.py`): one is written while another is read


class PendingMessage:
    """A message that is being sent or received, or several that end together."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def wait(self) -> None:
        """Returns when the message's tensor may be used: on the host for Gloo and IPC, on the current stream for NCCL.

        Raises ChannelError that names the peer if the channel broke, was aborted or passed its deadline.
        """
        self._action()


class Channel(ABC):
    """One rank's end of a channel."""

    def __init__(self, spec: ChannelSpec) -> None:
        self.spec = spec
        self._reason: str | None = None  # why it is broken
        self._agreement = Agreement(open_store(spec), spec)

    def send(self, tensor: torch.Tensor, peer: int) -> PendingMessage:
        """Sends `tensor`, which must not change before the wait."""
        return self.exchange([(tensor, peer)], [])[0]

    def receive(self, tensor: torch.Tensor, peer: int) -> PendingMessage:
        """Receives into `tensor`, which must have the message's size."""
        return self.exchange([], [(tensor, peer)])[0]

    @abstractmethod
    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> Sequence[PendingMessage]:
        """Posts several messages `(tensor, peer)` at once, as one group if the backend has groups.

        The peer must post all messages of one call in one call as well, in the same order.
        """

    def guarded(self) -> AbstractContextManager[None]:
        """Aborts the channel if the block, which launches work and messages, takes longer than the deadline.

        Does nothing if every wait for a message has the deadline anyway.
        """
        return nullcontext()

    def agree(self, refusal: str = "", *, wait: bool = True) -> None:
        """Votes that this rank is done, and returns when all ranks have voted; without `wait`, at once.

        With a `refusal` it votes against, for that reason, and returns; the others raise ChannelError with the reason. The
        channel stays usable, so a rank may only refuse when none of its messages is pending; otherwise it must abort. All
        ranks must call this equally often, in the same order. Raises ChannelError if a rank refused, aborted, died or did
        not vote within the deadline.
        """
        self._check_usable()
        self._agreement.reach(self._check_peers, refusal, wait=wait)

    def release(self) -> None:  # noqa: B027
        """Frees memory that is kept between messages, once peers no longer map it. The next message allocates it again."""

    def synchronize(self) -> None:  # noqa: B027
        """Blocks the host until all messages that were waited for are complete, at most until the deadline."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Breaks the channel, from any thread: this rank and its peers raise ChannelError instead of waiting."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything. May be called twice."""

    @abstractmethod
    def _check_usable(self) -> None:
        """Raises ChannelError if the channel is closed or broken."""

    def _check_peers(self) -> None:
        """Raises ChannelError while it waits for votes that will not come, if the backend can tell."""
        self._check_usable()


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
