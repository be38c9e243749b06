"""A ring of message slots in shared memory: one writer, any number of readers on the same host.

The writer copies a message once for all readers. Readers see large arrays in place, without a copy. There are no locks, so a
process that is killed blocks no other: the writer publishes a sequence number, each reader acknowledges the slots that it is
done with, and a slot is reused only when all have. Readers may keep arrays. A reader that holds `KEPT` messages in place
gets copies of further ones, so the ring has a slot for every message that can be held. The number of slots is fixed. The
lowest free slot is used, and pages exist once they are touched, so memory is that of the messages in flight.

The memory is an anonymous file (`memory.py`). Layout: 32-bit words (sequence number, closed flag, slots of the latest
messages, acknowledgements by slot and reader), then the slots. A slot holds 64-bit words (number of parts, bytes of each),
then the parts (a pickle and its buffers), each on a cache line.
"""

from __future__ import annotations

import functools
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dagrl.runtime.edges.futex import Watch, fence, pause_until
from dagrl.runtime.edges.memory import LINE, MemoryAddress, MessageTooLargeError, aligned, anonymous_memory, cut, open_memory
from dagrl.runtime.edges.pickling import load

IN_PLACE_BYTES = 32 << 10
"""Messages with larger buffers are read in place. Copying less than this is cheaper than tracking it."""

KEPT = 2  # messages that one reader may hold in place

PARALLEL_BYTES = 4 << 20
"""Larger parts are copied by several threads. One core copies 10 to 15 GB/s; the memory allows more."""

COPIERS = min(4, len(os.sched_getaffinity(0)) // 4)

_SEQUENCE, _CLOSED = 0, 1
_SLOTS = LINE // 4  # index of the table of slots, on a cache line that only the writer writes
_MASK = 0xFFFF_FFFF


@dataclass(frozen=True)
class RingAddress:
    """The address of a ring for other processes of the host."""

    memory: MemoryAddress
    slots: int
    slot_bytes: int
    readers: int

    @property
    def acknowledgements(self) -> int:
        """Index of the first acknowledgement word."""
        return aligned(4 * (_SLOTS + self.slots)) // 4

    @property
    def first_slot(self) -> int:
        """Offset of the slots in bytes."""
        return aligned(4 * (self.acknowledgements + self.slots * self.readers))


class Ring:
    """One process's view of a ring. The writer calls `create`, readers call `open`."""

    def __init__(self, address: RingAddress, memory: mmap.mmap, descriptor: int | None) -> None:
        self.address = address
        self._readers, self._slot_bytes = address.readers, address.slot_bytes
        self._slots, self._acknowledgements, self._first_slot = address.slots, address.acknowledgements, address.first_slot
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("I")
        self._sizes = self._bytes.cast("Q")
        self._memory = memory
        self._arrays = np.frombuffer(memory, dtype=np.uint8)
        self._watch = Watch(self._words, _CLOSED)
        self.messages_written = 0  # by this process; also the number of the last one
        self._message_of = [0] * address.slots  # the last message in each slot; used by the writer
        self.messages_read = 0  # or skipped, by this process
        self._held = 0
        if descriptor is not None:  # the writer keeps it open for the readers
            weakref.finalize(self, os.close, descriptor)

    @staticmethod
    def create(in_flight: int, slot_bytes: int, readers: int) -> Ring:
        """Creates a ring for `readers` readers: up to `in_flight` unread messages of up to `slot_bytes` bytes."""
        slots = in_flight + KEPT * readers
        address = RingAddress(anonymous_memory(), slots, aligned(slot_bytes), readers)
        descriptor, size = address.memory.descriptor, address.first_slot + slots * address.slot_bytes
        os.ftruncate(descriptor, size)
        return Ring(address, mmap.mmap(descriptor, size), descriptor)

    @staticmethod
    def open(address: RingAddress) -> Ring:
        """Opens the ring of another process. Raises EdgeClosedError if that process is gone or has closed it."""
        return Ring(address, open_memory(address.memory), None)

    def write(self, parts: Sequence[bytes | memoryview], timeout_s: float | None) -> None:
        """Publishes a message: a pickle and its buffers, as flat bytes. Waits until a slot is free."""
        head = aligned(8 * (len(parts) + 1))
        needed = head + sum([aligned(len(part)) for part in parts])
        if needed > self._slot_bytes:
            raise MessageTooLargeError(f"a message of {needed} bytes does not fit a slot of {self._slot_bytes} bytes")
        slot = self._wait_for_room(timeout_s)
        sequence = self.messages_written + 1
        start = self._first_slot + slot * self._slot_bytes
        offset = start + head
        word = start // 8
        self._sizes[word] = len(parts)
        for part in parts:
            word += 1
            self._sizes[word] = size = len(part)
            self._copy(part, offset, size)
            offset += aligned(size)
        self.messages_written = self._message_of[slot] = sequence
        self._words[_SLOTS + sequence % self._slots] = slot
        fence()
        self._words[_SEQUENCE] = sequence & _MASK
        self._watch.wake(_SEQUENCE)

    def read(self, reader: int, timeout_s: float | None) -> object:
        """Returns the next message, unpickled. Large arrays are copies, or views of the slot, read-only if there are more
        readers.

        Raises EdgeTimeoutError, EdgeClosedError, UnreadableError.
        """
        slot = self._next(timeout_s)
        start = self._first_slot + slot * self._slot_bytes
        word = start // 8
        count, size = self._sizes[word], self._sizes[word + 1]
        offset = start + aligned(8 * (count + 1))
        pickled = self._bytes[offset : offset + size]
        if count == 1:
            try:
                return load(pickled)
            finally:
                self._acknowledge(reader, slot, self.messages_read)
        sizes = self._sizes[word + 2 : word + 1 + count].tolist()
        # Not a slice of `_arrays`: arrays made from a slice refer to the slice's base and would not keep the slot.
        message = np.frombuffer(self._memory, np.uint8, self._slot_bytes, start)
        views = cut(message.data, offset - start + aligned(size), sizes)
        if self._held >= KEPT or sum(sizes) <= IN_PLACE_BYTES:
            try:
                return load(pickled, [_own(view) for view in views])
            finally:
                self._acknowledge(reader, slot, self.messages_read)
        self._held += 1  # until the last array in the slot is gone
        weakref.finalize(message, self._release, reader, slot, self.messages_read).atexit = False
        buffers = views if self._readers == 1 else [view.toreadonly() for view in views]
        return load(pickled, buffers)

    def skip(self, reader: int, timeout_s: float | None) -> None:
        slot = self._next(timeout_s)
        self._acknowledge(reader, slot, self.messages_read)

    def close(self) -> None:
        """Closes the ring for every process. Calls that wait, and later ones, raise EdgeClosedError."""
        self._words[_CLOSED] = 1
        self._watch.wake(_SEQUENCE)

    def _copy(self, part: bytes | memoryview, offset: int, size: int) -> None:
        if size < PARALLEL_BYTES or not COPIERS:
            self._bytes[offset : offset + size] = part
        else:
            _copy_in_parallel(np.frombuffer(part, dtype=np.uint8), self._arrays[offset : offset + size])

    def _next(self, timeout_s: float | None) -> int:
        """Waits for the next message and returns its slot."""
        self._watch.wait(_SEQUENCE, self.messages_read & _MASK, timeout_s)
        fence()
        self.messages_read += 1
        return self._words[_SLOTS + self.messages_read % self._slots]

    def _acknowledge(self, reader: int, slot: int, sequence: int) -> None:
        self._words[self._acknowledgements + slot * self._readers + reader] = sequence & _MASK

    def _release(self, reader: int, slot: int, sequence: int) -> None:
        self._held -= 1
        self._acknowledge(reader, slot, sequence)

    def _wait_for_room(self, timeout_s: float | None) -> int:
        """Returns a slot that every reader is done with: at once, unless too many messages are in flight."""
        slot = self._free_slot()
        if slot is None:
            late = f"no room for message {self.messages_written + 1}: a reader has not read the ones before it"
            slot = pause_until(self._free_slot, timeout_s, late)
        return slot

    def _free_slot(self) -> int | None:
        self._watch.check_open()
        place, readers = self._acknowledgements, self._readers
        for slot, message in enumerate(self._message_of):
            if self._words[place : place + readers].tolist().count(message & _MASK) == readers:
                return slot
            place += readers
        return None


def _own(view: memoryview) -> bytearray | memoryview:
    if len(view) < PARALLEL_BYTES or not COPIERS:
        return bytearray(view)
    copy = np.empty(len(view), dtype=np.uint8)
    _copy_in_parallel(np.frombuffer(view, dtype=np.uint8), copy)
    return copy.data


def _copy_in_parallel(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
    step = aligned(-(-len(source) // COPIERS))
    pieces = [slice(begin, begin + step) for begin in range(0, len(source), step)]
    list(_copiers().map(lambda piece: np.copyto(target[piece], source[piece]), pieces))


@functools.cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COPIERS, thread_name_prefix="dagrl-copy")
