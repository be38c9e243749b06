"""Channel between processes of one host: CUDA IPC on GPUs, also between two processes on one GPU; shared memory on CPUs.

NCCL cannot join two processes that share a GPU, which is how train and generation workers are colocated. Here every ordered
pair of ranks has a mailbox of two slots in the sender's memory, made when its first message comes (and again for a larger
one), mapped by the receiver once and kept until `release`. The owner frees one when nobody maps it any more. A sender copies
its message into a slot, a receiver out of it: live tensors are never mapped elsewhere, so they may move or lose their memory
between two refits (vLLM's sleep, offloaded weights).

Counters of messages written and read lie in a small table that all ranks map. A rank that waits looks at them, at a flag
that an abort sets, and at whether its peer's process still lives.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from dagrl.channels.agreement import Agreement
from dagrl.channels.base import MAILBOX_SLOTS, ChannelSpec, as_bytes, cannot_join, check_message, open_store
from dagrl.channels.ipc_memory import HostSegment, Segment, attach_segment, create_segment
from dagrl.deadline import within
from dagrl.errors import ChannelError
from dagrl.executors.futex import fence

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

_WRITTEN, _READ, _MAILBOX, _MAPPED, _FIELDS = 0, 1, 2, 3, 4
"""Columns of the table, one row for each ordered pair: messages, the sender's newest mailbox, and the one that is mapped."""
_SPIN_S, _PAUSE_S, _LOOK_S = 2e-3, 5e-5, 0.1  # wait without a pause, with one, and look after the peer's process
_MARGIN_S = 0.5  # for the store's own deadline, whose error says more
T = TypeVar("T")


class IpcPending:
    """A message on its way; receiving happens in `wait`, in the order posted."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def wait(self) -> None:
        """Return when the message's tensor may be used; raises ChannelError, also when asked again."""
        if self._action is not None:
            self._action()
            self._action = None


class IpcChannel:
    """One rank's end; see `dagrl.channels.base.Channel`. Tensors may lie on the host or on any GPU that both sides see."""

    def __init__(self, spec: ChannelSpec) -> None:
        self.spec = spec
        self._reason: str | None = None
        self._closed = False
        self._store: Store | None = open_store(spec)
        self._agreement = Agreement(self._store, spec)
        self._outgoing: dict[int, Segment] = {}  # the newest mailbox for each receiver
        self._outgrown: list[_Outgrown] = []
        self._incoming: dict[int, tuple[int, Segment]] = {}  # by sender: which of its mailboxes, and the mapping
        self._waiting: dict[int, list[IpcPending]] = {}
        self._table_segment: HostSegment | None = None
        self._lives: dict[int, _Process] = {}
        try:
            self._join()
        except BaseException:
            self.close()  # nothing stays open of an end that nobody has
            raise

    def _join(self) -> None:
        """Map the table, which rank 0 makes, and learn the others' processes."""
        spec, rows = self.spec, self.spec.size**2 + 1
        if spec.rank == 0:
            self._table_segment = HostSegment(rows * _FIELDS * 8)
            self._publish("table", self._table_segment.handle)
        else:
            self._table_segment = HostSegment.attach(self._load("table").partition(":")[2])
        import torch

        self._table: npt.NDArray[np.int64] = self._table_segment.bytes.view(torch.int64).view(rows, _FIELDS).numpy()
        self._flag = rows - 1
        self._publish(f"pid/{spec.rank}", str(os.getpid()))
        pids = [int(self._load(f"pid/{rank}")) for rank in range(spec.size)]
        for rank, pid in enumerate(pids):
            if rank != spec.rank:
                self._lives[rank] = self._process(rank, pid)
        self._agreement.reach(self._check_usable)  # all have mapped the table

    def _process(self, rank: int, pid: int) -> _Process:
        try:
            return _Process(pid)
        except OSError as error:
            raise cannot_join(
                self.spec, RuntimeError(f"the process of rank {rank}, {pid}, cannot be watched: {error}")
            ) from error

    def send(self, tensor: torch.Tensor, peer: int) -> IpcPending:
        """Copy `tensor` into the peer's mailbox, waiting for a free slot; it may change when this returns."""
        return self.exchange([(tensor, peer)], [])[0]

    def receive(self, tensor: torch.Tensor, peer: int) -> IpcPending:
        """Receive into `tensor`, when waited for."""
        return self.exchange([], [(tensor, peer)])[0]

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> list[IpcPending]:
        """Post several messages at once; those with one peer take one slot of its mailbox, one behind the other."""
        self._check_usable()
        for tensor, peer in (*sends, *receives):
            check_message(self.spec, tensor, peer, _device_type(tensor))
        sent = [self._send(tensors, peer) for peer, tensors in _by_peer(sends).items()]
        return [*sent, *(self._receive(tensors, peer) for peer, tensors in _by_peer(receives).items())]

    def _send(self, tensors: Sequence[torch.Tensor], peer: int) -> IpcPending:
        row = self._row(self.spec.rank, peer)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if peer not in self._outgoing or len(self._outgoing[peer].bytes) < MAILBOX_SLOTS * nbytes:
            self._make_mailbox(peer, row, nbytes, tensors[0].device)
        number = int(self._table[row, _WRITTEN])
        self._wait_until(lambda: number - int(self._table[row, _READ]) < MAILBOX_SLOTS, peer, f"taking {nbytes} bytes from")
        for tensor, place in zip(tensors, _places(self._outgoing[peer], number, tensors), strict=True):
            place.copy_(as_bytes(tensor))
        self._finish_copies(tensors[0].device)
        fence()
        self._table[row, _WRITTEN] = number + 1
        return IpcPending(self._check_usable)  # an abort may have come since

    def _receive(self, tensors: Sequence[torch.Tensor], peer: int) -> IpcPending:
        before = self._waiting.setdefault(peer, [])
        pending = IpcPending(lambda: self._take(tensors, peer, pending))
        before.append(pending)
        return pending

    def guarded(self) -> AbstractContextManager[None]:
        """Nothing more: every wait for a peer has it."""
        return nullcontext()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` itself: messages are posted by the host."""
        return work

    def agree(self, refusal: str = "", *, wait: bool = True) -> None:
        """See `Channel.agree`."""
        self._check_usable()
        self._agreement.reach(self._check_peers, refusal, wait=wait)

    def release(self) -> None:
        """Unmap the peers' mailboxes, and free the own ones: later, those that are mapped or have messages to be taken."""
        if self._closed or self._reason is not None:
            return
        self._let_go()

    def synchronize(self) -> None:
        """Wait on the host for the current stream; messages have been waited for."""
        import torch

        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._finish_copies(torch.device("cuda", torch.cuda.current_device()))

    def abort(self, reason: str) -> None:
        """Break the channel from any thread: every rank that waits sees it."""
        if self._closed or self._reason is not None:
            return
        self._reason = reason
        self._table[self._flag, 0] = self.spec.rank + 1
        self._agreement.abort(reason)

    def close(self) -> None:
        """Unmap the peers' mailboxes and free the own ones, once their receivers let go or a moment has passed."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + min(1.0, self.spec.timeout_s)
        self._let_go()
        while self._outgrown and all(self._lives.values()) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            self._free_outgrown()
        for one in self._outgrown:
            one.segment.close()
        for process in self._lives.values():
            process.close()
        self._outgrown = []
        if self._table_segment is not None:
            self._table_segment.close()
        self._agreement.close()
        self._store = None

    def _publish(self, key: str, text: str) -> None:
        self._ask(lambda store: store.set(f"ipc/{key}", text))

    def _load(self, key: str) -> str:
        """What a peer published, or will within the deadline."""
        return str(self._ask(lambda store: store.get(f"ipc/{key}")).decode())

    def _ask(self, question: Callable[[Store], T]) -> T:
        """Ask the store, which waits for a rank 0 that is stopped without the deadline that it was given."""
        store = self._store
        assert store is not None
        try:
            return within(self.spec.timeout_s + _MARGIN_S, lambda: question(store), "dagrl-ipc-store")
        except (RuntimeError, TimeoutError) as error:  # torch's DistError is one
            raise cannot_join(self.spec, error) from error

    def _row(self, sender: int, receiver: int) -> int:
        return sender * self.spec.size + receiver

    def _make_mailbox(self, peer: int, row: int, nbytes: int, device: torch.device) -> None:
        """Memory for two times `nbytes`; the peer has taken everything out of an earlier mailbox."""
        number = int(self._table[row, _WRITTEN])
        self._wait_until(lambda: int(self._table[row, _READ]) == number, peer, "emptying its mailbox by")
        if peer in self._outgoing:
            self._outgrow(peer)
        self._free_outgrown()
        segment = self._outgoing[peer] = create_segment(MAILBOX_SLOTS * nbytes, device)
        count = int(self._table[row, _MAILBOX]) + 1
        self._publish(f"mailbox/{row}/{count}", segment.handle)
        self._table[row, _MAILBOX] = count

    def _let_go(self) -> None:
        self._unmap()
        for peer in list(self._outgoing):
            self._outgrow(peer)
        self._free_outgrown()

    def _outgrow(self, peer: int) -> None:
        row = self._row(self.spec.rank, peer)
        written, number = int(self._table[row, _WRITTEN]), int(self._table[row, _MAILBOX])
        self._outgrown.append(_Outgrown(row, number, written, self._outgoing.pop(peer)))

    def _free_outgrown(self) -> None:
        """Free what its receiver has let go of: CUDA forbids to free memory that another process maps."""
        in_use = [one for one in self._outgrown if self._is_used(one)]
        for one in self._outgrown:
            if one not in in_use:
                one.segment.close()
        self._outgrown = in_use

    def _is_used(self, one: _Outgrown) -> bool:
        return int(self._table[one.row, _READ]) < one.written or int(self._table[one.row, _MAPPED]) == one.number

    def _unmap(self) -> None:
        for sender, (_, segment) in self._incoming.items():
            segment.close()
            fence()
            self._table[self._row(sender, self.spec.rank), _MAPPED] = 0
        self._incoming = {}

    def _take(self, tensors: Sequence[torch.Tensor], peer: int, pending: IpcPending) -> None:
        """Copy what `peer` posted next out of its mailbox, after what was posted before."""
        before = self._waiting[peer]
        while before[0] is not pending:
            before[0].wait()
        row = self._row(peer, self.spec.rank)
        number = int(self._table[row, _READ])
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self._wait_until(lambda: int(self._table[row, _WRITTEN]) > number, peer, f"sending {nbytes} bytes by")
        fence()
        for tensor, place in zip(tensors, _places(self._mailbox(peer, row), number, tensors), strict=True):
            # From another GPU through memory of torch's own: torch lets that GPU make the copy, which cannot write to memory
            # that is open to its own GPU alone, as what vLLM puts to sleep.
            as_bytes(tensor).copy_(place.to(tensor.device))
        self._finish_copies(tensors[0].device)
        fence()
        self._table[row, _READ] = number + 1
        before.pop(0)

    def _mailbox(self, peer: int, row: int) -> Segment:
        """The sender's newest mailbox, mapped once."""
        count = int(self._table[row, _MAILBOX])
        known = self._incoming.get(peer)
        if known is None or known[0] != count:
            if known is not None:
                known[1].close()
                fence()
            self._table[row, _MAPPED] = count
            handle = self._load(f"mailbox/{row}/{count}")
            known = self._incoming[peer] = count, attach_segment(handle)
        return known[1]

    def _finish_copies(self, device: torch.device) -> None:
        """Wait on the host for what the current stream was given, with the deadline."""
        if device.type != "cuda":
            return
        import torch

        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))
        self._wait_until(lambda: bool(done.query()), None, "copying")  # type: ignore[no-untyped-call]

    def _wait_until(self, ready: Callable[[], bool], peer: int | None, doing: str) -> None:
        start = looked = time.monotonic()
        while not ready():
            self._check_usable()
            now = time.monotonic()
            what = doing if peer is None else f"{doing} rank {peer}"
            if now - start > self.spec.timeout_s:
                raise self._broken(f"{what} did not end within {self.spec.timeout_s} s")
            if now - looked > _LOOK_S:
                looked = now
                if peer is not None and not self._lives[peer]:
                    raise self._broken(f"{what} will not happen: its process ended")
            if now - start > _SPIN_S:
                time.sleep(_PAUSE_S)

    def _check_peers(self) -> None:
        self._check_usable()
        gone = [rank for rank, process in self._lives.items() if not process]
        if gone:
            raise self._broken(f"the process of rank {gone[0]} ended")

    def _check_usable(self) -> None:
        if self._closed:
            raise ChannelError(f"{self.spec} is closed; open a new channel")
        if self._reason is not None:
            raise ChannelError(f"{self.spec} is broken: {self._reason}; open a new channel")
        if self._table[self._flag, 0]:
            raise ChannelError(f"{self.spec}: rank {self._table[self._flag, 0] - 1} broke it; open a new channel")

    def _broken(self, found: str) -> ChannelError:
        self.abort(found)
        return ChannelError(f"{self.spec}: {found}; open a new channel")


@dataclass(frozen=True, eq=False)
class _Outgrown:
    """Mailbox `number` of a pair, which gets no more messages after the `written`-th."""

    row: int
    number: int
    written: int
    segment: Segment


class _Process:
    """Whether a process still lives; a killed one counts as ended at once, also before its parent looks."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def __bool__(self) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        os.close(self._descriptor)


def _device_type(tensor: torch.Tensor) -> str:
    return "cuda" if tensor.is_cuda else "cpu"


def _by_peer(messages: Sequence[tuple[torch.Tensor, int]]) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for tensor, peer in messages:
        found.setdefault(peer, []).append(tensor)
    return found


def _places(segment: Segment, number: int, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Where in the slot of message `number` the bytes of each of `tensors` are."""
    start = number % MAILBOX_SLOTS * (len(segment.bytes) // MAILBOX_SLOTS)
    for tensor in tensors:
        yield segment.bytes[start : start + tensor.nbytes]
        start += tensor.nbytes
