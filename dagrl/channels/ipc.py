"""Channel between processes of one host: CUDA IPC on GPUs, also between two processes on one GPU; shared memory on CPUs.

NCCL cannot join two processes that share a GPU, which is how train and generation workers are colocated. Here each ordered
pair of ranks has a mailbox of two slots in the sender's memory. The sender allocates it for its first message, and again for
a larger one; the receiver maps it once and keeps it until `release`. The owner frees it once it is unmapped. Senders copy
into a slot and receivers copy out of it. Live tensors are never mapped, so they may move or lose their memory between two
refits (vLLM's sleep, offloaded weights).

A small table, mapped by all ranks, counts the messages written and read, and has the votes of agreements. A waiting rank
polls the counters, a flag that an abort sets, and whether its peer's process is alive.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from dagrl.channels.agreement import AGREEMENTS
from dagrl.channels.base import MAILBOX_SLOTS, Channel, PendingMessage, as_bytes, check_message
from dagrl.channels.ipc_memory import Borrowed, HostSegment, Loans, Segment, attach_segment, create_segment
from dagrl.channels.spec import ChannelSpec, cannot_join
from dagrl.errors import ChannelError
from dagrl.runtime.deadline import within
from dagrl.runtime.edges.futex import LONG_SPIN_S, fence, let_others_run

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_WRITTEN, _READ, _MAILBOX, _MAPPED, _FIELDS = 0, 1, 2, 3, 6
"""Columns of the table, a row a pair: messages written and read, newest mailbox, mapped one; two more are of `Loans`."""
_SPIN_S = max(2e-3, LONG_SPIN_S)  # longer than a copy, and the peer's wait for it
_PAUSE_S, _ALIVE_S = 5e-5, 0.1  # then sleep this long; check this often that the peer is alive
_KEPT_BYTES = 4096  # smaller mailboxes on the host outlive `release`: to make one again takes requests to the store
_MARGIN_S = 0.5  # lets the store's own deadline pass first: its error says more
T = TypeVar("T")


class IpcPending(PendingMessage):
    """A message that is being sent or received. `wait` does the receiving, in the order posted."""

    def wait(self) -> None:
        """Returns when the message's tensor may be used. Raises ChannelError, on every call after a failure."""
        self._action()
        self._action = lambda: None  # the former one refers to this message and its tensors, which would end up as garbage


class IpcChannel(Channel):
    """One rank's end. Tensors may be on the host or on any GPU that both sides see. A sent one may change at once."""

    def __init__(self, spec: ChannelSpec) -> None:
        super().__init__(spec)
        self._closed = False
        self._outgoing: dict[int, Segment] = {}  # the newest mailbox for each receiver
        self._outgrown: list[_Outgrown] = []
        self._incoming: dict[int, tuple[int, Segment]] = {}  # by sender: which of its mailboxes, and the mapping
        self._loans = Loans(spec)
        self._waiting: dict[int, list[IpcPending]] = {}
        self._table_segment: HostSegment | None = None
        self._lives: dict[int, _PeerProcess] = {}
        try:
            self._join()
        except BaseException:
            self.close()  # the caller gets no object to close
            raise

    def _join(self) -> None:
        """Maps the table, which rank 0 allocates, and opens handles of the other processes."""
        spec, rows = self.spec, self.spec.size**2 + 1
        if spec.rank == 0:
            self._table_segment = HostSegment(8 * (rows * _FIELDS + AGREEMENTS * spec.size))
            self._publish("table", self._table_segment.handle)
        else:
            self._table_segment = HostSegment.attach(self._load("table").partition(":")[2])
        words: npt.NDArray[np.int64] = self._table_segment.bytes.view(torch.int64).numpy()
        self._table = words[: rows * _FIELDS].reshape(rows, _FIELDS)
        self._flag, self._loans.table = rows - 1, self._table
        self._publish(f"pid/{spec.rank}", str(os.getpid()))
        pids = [int(self._load(f"pid/{rank}")) for rank in range(spec.size)]
        for rank, pid in enumerate(pids):
            if rank == spec.rank:
                continue
            try:
                self._lives[rank] = _PeerProcess(pid)
            except OSError as error:
                watched = f"the process of rank {rank}, {pid}, cannot be watched: {error}"
                raise cannot_join(spec, RuntimeError(watched)) from error
        self._agreement.reach(self._check_usable)  # all have mapped the table
        self._agreement.use_memory(words[rows * _FIELDS :])

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> list[IpcPending]:
        """Posts several messages at once. Those of one peer share a slot of its mailbox, back to back."""
        self._check_usable()
        for tensor, peer in (*sends, *receives):
            check_message(self.spec, tensor, peer, "cuda" if tensor.is_cuda else "cpu")
        sent = [self._send(tensors, peer) for peer, tensors in _by_peer(sends).items()]
        return [*sent, *(self._receive(tensors, peer) for peer, tensors in _by_peer(receives).items())]

    def _send(self, tensors: Sequence[torch.Tensor], peer: int) -> IpcPending:
        row = self._row(self.spec.rank, peer)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if peer not in self._outgoing or len(self._outgoing[peer].bytes) < MAILBOX_SLOTS * nbytes:
            self._make_mailbox(peer, row, nbytes, tensors[0].device)
        number = int(self._table[row, _WRITTEN])
        self._wait_until(lambda: number - int(self._table[row, _READ]) < MAILBOX_SLOTS, peer, f"sending {nbytes} bytes to")
        for tensor, slot in zip(tensors, _slot_parts(self._outgoing[peer], number, tensors), strict=True):
            slot.copy_(as_bytes(tensor))
        self._finish_copies(self._outgoing[peer].bytes.device)
        fence()
        self._table[row, _WRITTEN] = number + 1
        return IpcPending(self._check_usable)  # an abort may have come since

    def _receive(self, tensors: Sequence[torch.Tensor], peer: int) -> IpcPending:
        before = self._waiting.setdefault(peer, [])
        pending = IpcPending(lambda: self._take(tensors, peer, pending))
        before.append(pending)
        return pending

    def lend(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """See `Loans.lend`."""
        self._check_usable()
        return self._loans.lend(tensors, self._publish)

    def borrow(self, peer: int, number: int) -> Borrowed:
        """See `Loans.borrow`."""
        self._check_usable()
        return self._loans.borrow(peer, number, self._load)

    def reclaim(self) -> None:
        """See `Loans.reclaim`. Returns at once if the channel is broken or closed."""
        if not self._closed and self._reason is None and not self._table[self._flag, 0]:
            self._loans.reclaim(self._lives, lambda ready: self._wait_until(ready, None, "unmapping of tensors by peers"))

    def release(self) -> None:
        """Unmaps the peers' mailboxes and frees its own; those still mapped or holding messages are freed later."""
        if not self._closed and self._reason is None:
            self._release_mailboxes()

    def synchronize(self) -> None:
        """Waits on the host for the current stream; messages were waited for already."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._finish_copies(torch.device("cuda", torch.cuda.current_device()))

    def abort(self, reason: str) -> None:
        """Breaks the channel, from any thread; every waiting rank sees it."""
        if self._closed or self._reason is not None:
            return
        self._reason = reason
        self._table[self._flag, 0] = self.spec.rank + 1
        self._agreement.abort(reason)

    def close(self) -> None:
        """Unmaps the peers' mailboxes and frees its own, once receivers have unmapped them or after at most a second."""
        if self._closed:
            return
        self._closed = True
        self._loans.give_back()
        deadline = time.monotonic() + min(1.0, self.spec.timeout_s)
        self._release_mailboxes()
        while self._outgrown and all(self._lives.values()) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            self._free_outgrown()
        for mailbox in self._outgrown:
            mailbox.segment.close()
        for process in self._lives.values():
            process.close()
        self._outgrown = []
        if self._table_segment is not None:
            self._table_segment.close()
        self._agreement.close()

    def _publish(self, key: str, text: str) -> None:
        self._ask(lambda store: store.set(f"ipc/{key}", text))

    def _load(self, key: str) -> str:
        """Returns what a peer publishes under `key`, waiting until the deadline."""
        return str(self._ask(lambda store: store.get(f"ipc/{key}")).decode())

    def _ask(self, question: Callable[[Store], T]) -> T:
        """Sends a request to the store, with a deadline: the store ignores its own while rank 0 is stopped."""
        store = self._agreement.store
        try:
            return within(self.spec.timeout_s + _MARGIN_S, lambda: question(store), "dagrl-ipc-store")
        except (RuntimeError, TimeoutError) as error:  # torch's DistError is one
            raise cannot_join(self.spec, error) from error

    def _row(self, sender: int, receiver: int) -> int:
        return sender * self.spec.size + receiver

    def _make_mailbox(self, peer: int, row: int, nbytes: int, device: torch.device) -> None:
        """Allocates a mailbox for messages of `nbytes`, after the peer has emptied the earlier one."""
        number = int(self._table[row, _WRITTEN])
        self._wait_until(lambda: int(self._table[row, _READ]) == number, peer, "waiting for the mailbox to be emptied by")
        if peer in self._outgoing:
            self._outgrow(peer)
        self._free_outgrown()
        segment = self._outgoing[peer] = create_segment(MAILBOX_SLOTS * nbytes, device)
        count = int(self._table[row, _MAILBOX]) + 1
        self._publish(f"mailbox/{row}/{count}", segment.handle)
        self._table[row, _MAILBOX] = count

    def _release_mailboxes(self) -> None:
        for sender in [peer for peer, (_, segment) in self._incoming.items() if self._closed or not _is_kept(segment)]:
            self._incoming.pop(sender)[1].close()
            fence()
            self._table[self._row(sender, self.spec.rank), _MAPPED] = 0
        for peer in [peer for peer, segment in self._outgoing.items() if self._closed or not _is_kept(segment)]:
            self._outgrow(peer)
        self._free_outgrown()

    def _outgrow(self, peer: int) -> None:
        row = self._row(self.spec.rank, peer)
        written, number = int(self._table[row, _WRITTEN]), int(self._table[row, _MAILBOX])
        self._outgrown.append(_Outgrown(row, number, written, self._outgoing.pop(peer)))

    def _free_outgrown(self) -> None:
        """Frees the mailboxes that receivers have unmapped: CUDA forbids freeing memory that another process maps."""
        in_use = []
        for mailbox in self._outgrown:
            unread = self._table[mailbox.row, _READ] < mailbox.written
            if unread or self._table[mailbox.row, _MAPPED] == mailbox.number:
                in_use.append(mailbox)
            else:
                mailbox.segment.close()
        self._outgrown = in_use

    def _take(self, tensors: Sequence[torch.Tensor], peer: int, pending: IpcPending) -> None:
        """Copies the peer's next message out of its mailbox, after the messages that were posted earlier."""
        before = self._waiting[peer]
        while before[0] is not pending:
            before[0].wait()
        row = self._row(peer, self.spec.rank)
        number = int(self._table[row, _READ])
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self._wait_until(lambda: int(self._table[row, _WRITTEN]) > number, peer, f"receiving {nbytes} bytes from")
        fence()
        for tensor, slot in zip(tensors, _slot_parts(self._mailbox(peer, row), number, tensors), strict=True):
            # From another GPU, copy through memory of torch's allocator: the other GPU makes the copy, and cannot write to
            # memory that is mapped for this GPU alone, such as the memory that vLLM puts to sleep.
            as_bytes(tensor).copy_(slot.to(tensor.device))
        self._finish_copies(tensors[0].device)
        fence()
        self._table[row, _READ] = number + 1
        before.pop(0)

    def _mailbox(self, peer: int, row: int) -> Segment:
        """Returns the sender's newest mailbox, and maps it the first time."""
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
        """Waits on the host for the work queued on the current stream, with the deadline."""
        if device.type != "cuda":
            return
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))
        self._wait_until(lambda: bool(done.query()), None, "copying on the GPU")  # type: ignore[no-untyped-call]

    def _wait_until(self, ready: Callable[[], bool], peer: int | None, doing: str) -> None:
        start = checked = time.monotonic()
        while not ready():
            self._check_usable()
            now = time.monotonic()
            what = doing if peer is None else f"{doing} rank {peer}"
            if now - start > self.spec.timeout_s:
                raise self._broken(f"{what} did not finish within {self.spec.timeout_s} s")
            if now - checked > _ALIVE_S:
                checked = now
                if peer is not None and not self._lives[peer]:
                    raise self._broken(f"{what} failed: its process ended")
            if now - start < _SPIN_S:
                let_others_run()
            else:
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

    def _broken(self, reason: str) -> ChannelError:
        self.abort(reason)
        return ChannelError(f"{self.spec}: {reason}; open a new channel")


@dataclass(frozen=True, eq=False)
class _Outgrown:
    """Mailbox `number` of a pair; its last message is the `written`-th."""

    row: int
    number: int
    written: int
    segment: Segment


class _PeerProcess:
    """True while a process is alive. A killed process counts as ended at once, even before its parent reaps it."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def __bool__(self) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        os.close(self._descriptor)


def _is_kept(segment: Segment) -> bool:
    return not segment.bytes.is_cuda and len(segment.bytes) <= _KEPT_BYTES


def _by_peer(messages: Sequence[tuple[torch.Tensor, int]]) -> dict[int, list[torch.Tensor]]:
    by_peer: dict[int, list[torch.Tensor]] = {}
    for tensor, peer in messages:
        by_peer.setdefault(peer, []).append(tensor)
    return by_peer


def _slot_parts(segment: Segment, number: int, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields the bytes of each of `tensors` in the slot of message `number`."""
    start = number % MAILBOX_SLOTS * (len(segment.bytes) // MAILBOX_SLOTS)
    for tensor in tensors:
        yield segment.bytes[start : start + tensor.nbytes]
        start += tensor.nbytes
