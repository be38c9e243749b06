"""Waiting for a word of shared memory to change, without polling: Linux's futex, through ctypes.

Ray's own shared-memory channels poll (`sched_yield` in a loop), so that every graph alive on a worker takes a whole core
while nothing happens. See futex(2); the words are shared between processes, so the flag for private ones is not set.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time

from dagrl.errors import RunError

_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
_EVERYONE = 0x7FFF_FFFF

SPIN_S = 60e-6
"""How long to look for the change before sleeping. A hop between two awake workers takes 20 to 40 us, waking one that sleeps
as much again, so this keeps back-to-back replays awake; a worker that has nothing to do looks once and then sleeps."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Word:
    """A 32-bit word in shared memory that readers wait on. One process writes it."""

    def __init__(self, words: memoryview, index: int) -> None:
        if platform.machine() not in _NUMBERS:
            raise RunError(
                f"compiled graphs wait on a futex, whose number on {platform.machine()} is unknown; set executor: eager"
            )
        self._words = words  # format "I"
        self._index = index
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._number = ctypes.c_long(_NUMBERS[platform.machine()])
        self._anchor = ctypes.c_uint32.from_buffer(words, index * 4)
        self._address = ctypes.c_void_p(ctypes.addressof(self._anchor))

    def wait_change(self, known: int, seconds: float) -> bool:
        """Whether the word differs from `known`, within `seconds`."""
        words, index = self._words, self._index
        if words[index] != known:
            return True
        started = time.perf_counter()
        while time.perf_counter() - started < SPIN_S:
            os.sched_yield()
            if words[index] != known:
                return True
        left = seconds - SPIN_S
        if left > 0:  # returns at once if the word has changed meanwhile; early on a signal
            limit = _Timespec(int(left), int(left % 1 * 1e9))
            self._call(self._number, self._address, _WAIT, ctypes.c_uint32(known), ctypes.byref(limit), None, 0)
        return words[index] != known

    def set(self, value: int) -> None:
        """Change the word and wake all who wait."""
        fence()
        self._words[self._index] = value
        self.wake()

    def wake(self) -> None:
        """Wake all who wait, so that they look again."""
        self._call(self._number, self._address, _WAKE, _EVERYONE, None, None, 0)


_ORDERED = platform.machine() == "x86_64"
_first, _second = threading.Lock(), threading.Lock()


def fence() -> None:
    """Order the memory accesses before it and after it; x86 keeps that order by itself (loads and stores alike)."""
    if not _ORDERED:
        with _first:
            pass
        with _second:
            pass
