"""A ring of message slots in shared memory: one writer, any number of readers on the same host.

The writer copies a message once, whatever the number of readers; readers see large arrays in place, without a copy. Nothing
is locked, so a process that is killed blocks nobody: the writer publishes a sequence number, each reader acknowledges the
slots that it is done with, and a slot is written again only when all have. Arrays may be kept: a reader that holds `KEPT`
messages in place gets copies, and there is a slot for every message that can be held. The size is fixed; the lowest free
slot is taken and pages are used when touched, so memory is that of the messages in flight.

The memory is an anonymous file (memfd_create(2)) that other processes of the same user open through the writer's
`/proc/<pid>/fd`: it ends with the last process that has it mapped and leaves nothing in `/dev/shm`.

Layout: 32-bit words (sequence number, closed flag, the slots of the latest messages, acknowledgements by slot and reader),
then the slots. A slot: 64-bit words (number of parts, bytes of each), then the parts (a pickle, its buffers), each on a
cache line.
"""

from __future__ import annotations

import functools
import mmap
import os
import pickle
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dagrl.errors import RunError
from dagrl.executors.futex import Futexes, fence

LINE = 64
"""Bytes of a cache line; parts of a message start on one."""

IN_PLACE_BYTES = 32 << 10
"""Messages with larger buffers are read in place; copying less than this costs less than keeping track of it."""

KEPT = 2
"""Messages that one reader may hold in place."""

PARALLEL_BYTES = 4 << 20
"""Parts of at least this size are copied by several threads: one core copies 10 to 15 GB a second, the memory has more."""

_CORES = len(os.sched_getaffinity(0))
COPIERS = min(4, _CORES // 4)

SHORT_SPIN_S = 30e-6
LONG_SPIN_S = 20e-3 if _CORES >= 16 else 60e-6
"""How long to look for a message before sleeping: long if the last one came within that time, else short. Waking a sleeper
takes 50 to 200 us, so back-to-back replays stay awake, and a worker whose next replay is far away sleeps at once. The long
time must exceed that of a chain of 64 sleepers, or the chain never wakes. On a small machine the one who looks takes the
core of the one who is to send."""

_SEQUENCE, _CLOSED = 0, 1
_SLOTS = LINE // 4  # index of the table of slots, on a cache line that the writer alone writes
_LOOK_S = 0.5  # how long to sleep before looking again whether the ring was closed
_MASK = 0xFFFF_FFFF


class RingClosedError(RunError):
    """The ring was closed, or its writer is gone."""


class RingTimeoutError(RunError):
    """No message, or no room, in time."""


class MessageTooLargeError(RunError):
    """A message does not fit a slot."""


@dataclass(frozen=True)
class RingAddress:
    """Where the memory of a ring is, for a process that wants to open it."""

    pid: int
    descriptor: int
    slots: int
    slot_bytes: int
    readers: int

    @property
    def acknowledgements(self) -> int:
        """Index of their first word."""
        return _aligned(4 * (_SLOTS + self.slots)) // 4

    @property
    def first_slot(self) -> int:
        """Offset of the slots in bytes."""
        return _aligned(4 * (self.acknowledgements + self.slots * self.readers))


class Ring:
    """One ring as one process sees it; make it with `create` (the writer) or `open` (a reader)."""

    def __init__(self, address: RingAddress, memory: mmap.mmap, descriptor: int | None) -> None:
        self.address = address
        self._readers, self._slot_bytes = address.readers, address.slot_bytes
        self._slots, self._acknowledgements, self._first_slot = address.slots, address.acknowledgements, address.first_slot
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("I")
        self._sizes = self._bytes.cast("Q")
        self._arrays = np.frombuffer(memory, dtype=np.uint8)
        self._futexes = Futexes(self._words)
        self._written = 0
        self._message_of = [0] * address.slots  # for the writer: the last message in each slot
        self._read = 0
        self._held = 0
        self._spin_s = SHORT_SPIN_S
        if descriptor is not None:  # the writer keeps it open, for readers to find
            weakref.finalize(self, os.close, descriptor)

    @staticmethod
    def create(in_flight: int, slot_bytes: int, readers: int) -> Ring:
        """A ring of messages of up to `slot_bytes` bytes, of which `in_flight` can be unread, for `readers` readers."""
        slots = in_flight + KEPT * readers
        descriptor = os.memfd_create("dagrl")
        address = RingAddress(os.getpid(), descriptor, slots, _aligned(slot_bytes), readers)
        size = address.first_slot + slots * address.slot_bytes
        os.ftruncate(descriptor, size)
        return Ring(address, mmap.mmap(descriptor, size), descriptor)

    @staticmethod
    def open(address: RingAddress) -> Ring:
        """The ring of another process. Raises RingClosedError when that process is gone."""
        try:
            descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR)
        except OSError as error:
            raise RingClosedError(f"the process {address.pid} that writes this edge cannot be reached: {error}") from error
        try:
            return Ring(address, mmap.mmap(descriptor, 0), None)
        finally:
            os.close(descriptor)

    def write(self, parts: Sequence[bytes | memoryview], timeout_s: float | None) -> None:
        """Publish a message: a pickle, then its buffers (all flat bytes). Waits until all readers are done with the slot."""
        head = _aligned(8 * (len(parts) + 1))
        needed = head + sum([_aligned(len(part)) for part in parts])
        if needed > self._slot_bytes:
            raise MessageTooLargeError(f"a message of {needed} bytes does not fit a slot of {self._slot_bytes} bytes")
        slot = self._wait_for_room(timeout_s)
        sequence = self._written + 1
        start = self._first_slot + slot * self._slot_bytes
        offset = start + head
        word = start // 8
        self._sizes[word] = len(parts)
        for part in parts:
            word += 1
            self._sizes[word] = size = len(part)
            self._copy(part, offset, size)
            offset += _aligned(size)
        self._written = self._message_of[slot] = sequence
        self._words[_SLOTS + sequence % self._slots] = slot
        fence()
        self._words[_SEQUENCE] = sequence & _MASK
        self._futexes.wake(_SEQUENCE)

    def read(self, reader: int, timeout_s: float | None) -> object:
        """The next message, unpickled. Large arrays lie in the slot, read-only if there are other readers, or are copies."""
        slot = self._next(timeout_s)
        start = self._first_slot + slot * self._slot_bytes
        word = start // 8
        count = self._sizes[word]
        offset = start + _aligned(8 * (count + 1))
        size = self._sizes[word + 1]
        pickled = self._bytes[offset : offset + size]
        if count == 1:
            value = pickle.loads(pickled)  # noqa: S301  # written by a process of the same run
            self._acknowledge(reader, slot, self._read)
            return value
        sizes = self._sizes[word + 2 : word + 1 + count].tolist()
        message = self._arrays[start : start + self._slot_bytes]
        views = _cut(message.data, offset - start + _aligned(size), sizes)
        if self._held >= KEPT or sum(sizes) <= IN_PLACE_BYTES:
            value = pickle.loads(pickled, buffers=[_own(view) for view in views])  # noqa: S301
            self._acknowledge(reader, slot, self._read)
            return value
        self._held += 1  # until the last array that lies in the slot is gone
        weakref.finalize(message, self._release, reader, slot, self._read).atexit = False
        buffers = views if self._readers == 1 else [view.toreadonly() for view in views]
        return pickle.loads(pickled, buffers=buffers)  # noqa: S301

    def skip(self, reader: int, timeout_s: float | None) -> None:
        """Let the next message go unread."""
        slot = self._next(timeout_s)
        self._acknowledge(reader, slot, self._read)

    def close(self) -> None:
        """End the ring for every process: whoever waits, or comes later, gets RingClosedError."""
        self._words[_CLOSED] = 1
        self._futexes.wake(_SEQUENCE)

    def _copy(self, part: bytes | memoryview, offset: int, size: int) -> None:
        if size < PARALLEL_BYTES or not COPIERS:
            self._bytes[offset : offset + size] = part
        else:
            _copy_in_parallel(np.frombuffer(part, dtype=np.uint8), self._arrays[offset : offset + size])

    def _next(self, timeout_s: float | None) -> int:
        """The slot of the next message, once it is there."""
        self._wait_for_message(timeout_s)
        fence()
        self._read += 1
        return self._words[_SLOTS + self._read % self._slots]

    def _acknowledge(self, reader: int, slot: int, sequence: int) -> None:
        self._words[self._acknowledgements + slot * self._readers + reader] = sequence & _MASK

    def _release(self, reader: int, slot: int, sequence: int) -> None:
        self._held -= 1
        self._acknowledge(reader, slot, sequence)

    def _wait_for_message(self, timeout_s: float | None) -> None:
        """Return when there is a message that was not read yet."""
        words, known = self._words, self._read & _MASK
        if words[_SEQUENCE] != known and not words[_CLOSED]:
            return
        started = time.perf_counter()
        self._spin(known, started)
        while words[_SEQUENCE] == known or words[_CLOSED]:
            self._sleep(known, started, timeout_s)
        self._spin_s = LONG_SPIN_S if time.perf_counter() - started < LONG_SPIN_S else SHORT_SPIN_S

    def _spin(self, known: int, started: float) -> None:
        words, until = self._words, started + self._spin_s
        while words[_SEQUENCE] == known and not words[_CLOSED] and time.perf_counter() < until:
            self._futexes.let_others_run()

    def _sleep(self, known: int, started: float, timeout_s: float | None) -> None:
        if self._words[_CLOSED]:
            raise RingClosedError("this edge was closed")
        left = _LOOK_S if timeout_s is None else started + timeout_s - time.perf_counter()
        if left <= 0:
            raise RingTimeoutError("no message in time")
        self._futexes.wait(_SEQUENCE, known, min(left, _LOOK_S))

    def _wait_for_room(self, timeout_s: float | None) -> int:
        """A slot that every reader is done with; there is one at once, unless more is sent than may be in flight."""
        started, pause_s = time.perf_counter(), 50e-6
        while (slot := self._free_slot()) is None:
            if timeout_s is not None and time.perf_counter() - started >= timeout_s:
                raise RingTimeoutError(f"no room for message {self._written + 1}: a reader has not read the ones before it")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 2e-3)
        return slot

    def _free_slot(self) -> int | None:
        if self._words[_CLOSED]:
            raise RingClosedError("this edge was closed")
        place, readers = self._acknowledgements, self._readers
        for slot, message in enumerate(self._message_of):
            if self._words[place : place + readers].tolist().count(message & _MASK) == readers:
                return slot
            place += readers
        return None


def _own(view: memoryview) -> bytearray | memoryview:
    """A copy of a part of a message."""
    if len(view) < PARALLEL_BYTES or not COPIERS:
        return bytearray(view)
    copy = np.empty(len(view), dtype=np.uint8)
    _copy_in_parallel(np.frombuffer(view, dtype=np.uint8), copy)
    return copy.data


def _copy_in_parallel(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
    step = _aligned(-(-len(source) // COPIERS))
    pieces = [slice(begin, begin + step) for begin in range(0, len(source), step)]
    list(_copiers().map(lambda piece: np.copyto(target[piece], source[piece]), pieces))


@functools.cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COPIERS, thread_name_prefix="dagrl-copy")


def _cut(whole: memoryview, offset: int, sizes: Sequence[int]) -> list[memoryview]:
    views = []
    for size in sizes:
        views.append(whole[offset : offset + size])
        offset += _aligned(size)
    return views


def _aligned(size: int) -> int:
    return -(-size // LINE) * LINE
