"""A mailbox in shared memory: many writers on one host, one reader that looks at all their messages at once.

A driver that reads one ring per worker spends 10 to 15 us on each, one after the other. In a mailbox the workers' sequence
numbers are next to each other, and their messages are in cells of a fixed size. So the reader finds all new messages with
one look, unpickles them while other workers still write, and acknowledges all with one word. Every writer posts one message
per replay, so the messages of a replay have the same number. A message that does not fit a cell is sent over the writer's
own ring (`ring.py`), and the cell holds its number there.

The reader creates the memory, an anonymous file like that of a ring. Layout: 32-bit words (closed flag, number of the last
message read, and on further cache lines the number of each writer's last message), then the cells, grouped by message
number.
"""

from __future__ import annotations

import mmap
import os
import pickle
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from dagrl.errors import RunError
from dagrl.runtime.edges.futex import Watch, fence, pause_until
from dagrl.runtime.edges.memory import LINE, MemoryAddress, aligned, anonymous_memory, open_memory
from dagrl.runtime.edges.pickling import load

CELL_BYTES = 2048
"""Room for a small result, such as the metrics of a step. Larger results are sent over the writer's ring."""

_CLOSED, _READ = 0, LINE // 4
_WRITTEN = 2 * LINE // 4  # index of the first writer's word
_HALF = 1 << 31
_MASK = 0xFFFF_FFFF


@dataclass(frozen=True)
class MailboxAddress:
    """The address of a mailbox for other processes of the host."""

    memory: MemoryAddress
    writers: int
    slots: int

    @property
    def first_cell(self) -> int:
        """Offset of the cells in bytes."""
        return aligned(4 * (_WRITTEN + self.writers))

    @property
    def size(self) -> int:
        """Bytes of the whole memory."""
        return self.first_cell + self.slots * self.writers * CELL_BYTES


class Mailbox:
    """One process's view of a mailbox. The reader calls `create`, writers call `open`."""

    def __init__(self, address: MailboxAddress, memory: mmap.mmap, descriptor: int | None) -> None:
        self.address = address
        self._first_cell, self._slots, self._writers = address.first_cell, address.slots, address.writers
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("I")
        self._written = self._words[_WRITTEN : _WRITTEN + address.writers]
        self._watch = Watch(self._words, _CLOSED)
        self._cells: list[list[memoryview]] = []
        if descriptor is not None:  # the reader keeps it open for the writers
            self._cells = [[self._cell(slot, writer) for writer in range(address.writers)] for slot in range(address.slots)]
            weakref.finalize(self, os.close, descriptor)

    @staticmethod
    def create(writers: int, slots: int) -> Mailbox:
        """Creates a mailbox for `writers` processes of this host, each up to `slots` messages ahead of the reader."""
        address = MailboxAddress(anonymous_memory(), writers, slots)
        descriptor = address.memory.descriptor
        os.ftruncate(descriptor, address.size)
        return Mailbox(address, mmap.mmap(descriptor, address.size), descriptor)

    @staticmethod
    def open(address: MailboxAddress) -> Mailbox:
        """Opens the mailbox of another process. Raises EdgeClosedError if that process is gone or has closed it."""
        return Mailbox(address, open_memory(address.memory), None)

    def post(self, writer: int, number: int, message: bytes, timeout_s: float | None) -> None:
        """Publishes message `number` (1, 2, ...) of a writer: a pickle of at most `CELL_BYTES` bytes.

        Waits while the writer is `slots` messages ahead of the reader. Raises EdgeTimeoutError, EdgeClosedError.
        """
        size = len(message)
        if size > CELL_BYTES:
            raise RunError(f"a message of {size} bytes does not fit a cell of {CELL_BYTES} bytes")
        self._wait_for_room(number, timeout_s)
        start = self._offset(number % self._slots, writer)
        self._bytes[start : start + size] = message
        fence()
        self._words[_WRITTEN + writer] = number & _MASK
        self._watch.wake(_WRITTEN + writer)

    def collect(self, number: int, timeout_s: float) -> list[object]:
        """Returns message `number` of every writer, unpickled, in the order of the writers. Drops earlier ones.

        Raises EdgeTimeoutError, EdgeClosedError, UnreadableError.
        """
        self._watch.check_open()
        cells, wanted = self._cells[number % self._slots], number & _MASK
        written = self._written.tolist()
        if written.count(wanted) == len(cells):
            fence()
            messages = _all_unpickled(cells)
        else:
            messages = self._collect_as_they_come(cells, wanted, timeout_s)
        self._words[_READ] = wanted
        return messages

    def look(self, number: int) -> dict[int, object]:
        """Returns message `number` of the writers that have posted it, unpickled."""
        wanted, cells = number & _MASK, self._cells[number % self._slots]
        ready = [writer for writer, last in enumerate(self._written.tolist()) if (last - wanted) & _MASK < _HALF]
        fence()
        return dict(zip(ready, _all_unpickled([cells[writer] for writer in ready]), strict=True))

    def close(self) -> None:
        """Closes the mailbox for every process. Calls that wait, and later ones, raise EdgeClosedError."""
        self._words[_CLOSED] = 1
        for writer in range(self.address.writers):
            self._watch.wake(_WRITTEN + writer)

    def _wait_for_room(self, number: int, timeout_s: float | None) -> None:
        """Returns once the cell of message `number` is free: at once, unless too many messages are in flight."""
        if not self._has_room(number):
            late = f"no room for message {number}: the reader has not read the ones before it"
            pause_until(lambda: self._has_room(number) or None, timeout_s, late)

    def _has_room(self, number: int) -> bool:
        self._watch.check_open()
        return (number - self._words[_READ]) & _MASK <= self._slots

    def _collect_as_they_come(self, cells: list[memoryview], wanted: int, timeout_s: float) -> list[object]:
        messages: list[object] = [None] * len(cells)
        missing = list(range(len(cells)))
        deadline = time.perf_counter() + timeout_s
        while missing:
            written = self._written.tolist()
            late = [writer for writer in missing if (written[writer] - wanted) & _MASK >= _HALF]
            fence()
            for writer in set(missing).difference(late) if late else missing:
                (messages[writer],) = _all_unpickled([cells[writer]])
            if late and len(late) == len(missing):
                self._watch.wait(_WRITTEN + late[0], written[late[0]], deadline - time.perf_counter())
            missing = late
        return messages

    def _cell(self, slot: int, writer: int) -> memoryview:
        start = self._offset(slot, writer)
        return self._bytes[start : start + CELL_BYTES]

    def _offset(self, slot: int, writer: int) -> int:
        return self._first_cell + (slot * self._writers + writer) * CELL_BYTES


def _all_unpickled(cells: Sequence[memoryview]) -> list[object]:
    with suppress(Exception):  # one of them cannot be unpickled; `load` for each would take 0.1 us more per cell
        return list(map(pickle.loads, cells))  # written by processes of the same run
    return list(map(load, cells))
