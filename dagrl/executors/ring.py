"""A ring of message slots in shared memory: one writer, any number of readers on the same host.

The writer copies a message once, whatever the number of readers; readers see large arrays in place, without a copy. Nothing
is locked, so a process that is killed blocks nobody: the writer publishes a sequence number, each reader acknowledges the
slots that it is done with, and a slot is written again only when all have. The size is fixed; pages are used when touched.

The memory is an anonymous file (memfd_create(2)) that other processes of the same user open through the writer's
`/proc/<pid>/fd`: it ends with the last process that has it mapped and leaves nothing in `/dev/shm`.

Layout: 32-bit words (sequence number, closed flag, acknowledgements by slot and reader), then the slots. A slot: 64-bit
words (number of parts, bytes of each part), then the parts (the pickle, its buffers), each on a cache line.
"""

from __future__ import annotations

import mmap
import os
import pickle
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dagrl.errors import RunError
from dagrl.executors.futex import Word, fence

LINE = 64
"""Bytes of a cache line; parts of a message start on one."""

IN_PLACE_BYTES = 32 << 10
"""Messages with larger buffers are read in place; copying less than this costs less than keeping track of it."""

_SEQUENCE, _CLOSED, _ACKNOWLEDGED = 0, 1, 16
_LOOK_S = 0.5  # how long to sleep before looking again whether the ring was closed


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


class Ring:
    """One ring as one process sees it; make it with `create` (the writer) or `open` (a reader)."""

    def __init__(self, address: RingAddress, memory: mmap.mmap, descriptor: int | None) -> None:
        self.address = address
        self._slots, self._readers = address.slots, address.readers
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("I")
        self._sizes = self._bytes.cast("Q")
        self._first = _first_slot(address)
        self._sequence = Word(self._words, _SEQUENCE)
        self._written = self._words[_SEQUENCE]
        self._read = 0
        self._whole = np.frombuffer(memory, dtype=np.uint8)
        if descriptor is not None:  # the writer keeps it open, for readers to find
            weakref.finalize(self, os.close, descriptor)

    @staticmethod
    def create(slots: int, slot_bytes: int, readers: int) -> Ring:
        """A ring of `slots` messages of up to `slot_bytes` bytes, for `readers` readers."""
        slot_bytes = _aligned(slot_bytes)
        descriptor = os.memfd_create("dagrl")
        address = RingAddress(os.getpid(), descriptor, slots, slot_bytes, readers)
        size = _first_slot(address) + slots * slot_bytes
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
        sequence = self._written + 1
        slot = sequence % self._slots
        self._wait_for_room(slot, sequence, timeout_s)
        sizes = [len(part) for part in parts]
        offset = start = self._first + slot * self.address.slot_bytes
        offset += _aligned(8 * (len(sizes) + 1))
        needed = offset - start + sum(_aligned(size) for size in sizes)
        if needed > self.address.slot_bytes:
            raise MessageTooLargeError(f"a message of {needed} bytes does not fit a slot of {self.address.slot_bytes} bytes")
        word = start // 8
        self._sizes[word] = len(sizes)
        for part, size in zip(parts, sizes, strict=True):
            word += 1
            self._sizes[word] = size
            self._bytes[offset : offset + size] = part
            offset += _aligned(size)
        self._written = sequence
        self._sequence.set(sequence & 0xFFFF_FFFF)

    def read(self, reader: int, timeout_s: float | None, *, in_place: bool) -> object:
        """The next message, unpickled. Its large arrays are read-only views of the slot if `in_place`, else copies."""
        sequence = self._read + 1
        self._wait_for_message(timeout_s)
        fence()
        slot = sequence % self._slots
        start = self._first + slot * self.address.slot_bytes
        word = start // 8
        sizes = self._sizes[word + 1 : word + 1 + self._sizes[word]].tolist()
        offset = start + _aligned(8 * (len(sizes) + 1))
        pickled = self._bytes[offset : offset + sizes[0]]
        acknowledgement = _ACKNOWLEDGED + slot * self._readers + reader
        self._read = sequence
        if len(sizes) == 1:
            value = pickle.loads(pickled)  # noqa: S301  # written by a process of the same run
            self._words[acknowledgement] = sequence & 0xFFFF_FFFF
            return value
        offset += _aligned(sizes[0])
        large = in_place and sum(sizes[1:]) > IN_PLACE_BYTES
        whole = self._whole[start : start + self.address.slot_bytes]
        source = memoryview(whole.data).toreadonly() if large else self._bytes[start : start + self.address.slot_bytes]
        buffers: list[memoryview | bytearray] = []
        for size in sizes[1:]:
            part = source[offset - start : offset - start + size]
            buffers.append(part if large else bytearray(part))
            offset += _aligned(size)
        value = pickle.loads(pickled, buffers=buffers)  # noqa: S301
        if large:  # the slot is free again when the last array that lies in it is gone
            weakref.finalize(whole, self._acknowledge, acknowledgement, sequence).atexit = False
        else:
            self._acknowledge(acknowledgement, sequence)
        return value

    def skip(self, reader: int, timeout_s: float | None) -> None:
        """Let the next message go unread."""
        self._wait_for_message(timeout_s)
        self._read += 1
        self._acknowledge(_ACKNOWLEDGED + self._read % self._slots * self._readers + reader, self._read)

    def close(self) -> None:
        """End the ring for every process: whoever waits, or comes later, gets RingClosedError."""
        self._words[_CLOSED] = 1
        self._sequence.wake()

    def _acknowledge(self, place: int, sequence: int) -> None:
        self._words[place] = sequence & 0xFFFF_FFFF

    def _wait_for_message(self, timeout_s: float | None) -> None:
        known = self._read & 0xFFFF_FFFF
        if self._words[_SEQUENCE] != known and not self._words[_CLOSED]:
            return
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._words[_CLOSED]:
                raise RingClosedError("this edge was closed")
            left = _LOOK_S if deadline is None else min(_LOOK_S, max(0.0, deadline - time.monotonic()))
            if self._sequence.wait_change(known, left):
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise RingTimeoutError("no message in time")

    def _wait_for_room(self, slot: int, sequence: int, timeout_s: float | None) -> None:
        """Return when every reader is done with the message that the slot holds; at once, as a rule."""
        place = _ACKNOWLEDGED + slot * self._readers
        expected = max(0, sequence - self._slots) & 0xFFFF_FFFF
        if self._words[place : place + self._readers].tolist().count(expected) == self._readers and not self._words[_CLOSED]:
            return
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = 50e-6
        while self._words[_CLOSED] or self._words[place : place + self._readers].tolist().count(expected) < self._readers:
            if self._words[_CLOSED]:
                raise RingClosedError("this edge was closed")
            if deadline is not None and time.monotonic() >= deadline:
                raise RingTimeoutError(
                    f"no room for message {sequence}: a reader has not read message {expected}, or still holds its arrays; "
                    "copy arrays that are kept beyond a replay"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 2e-3)


def _aligned(size: int) -> int:
    return -(-size // LINE) * LINE


def _first_slot(address: RingAddress) -> int:
    return _aligned(4 * (_ACKNOWLEDGED + address.slots * address.readers))
