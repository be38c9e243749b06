"""Waiting for a word of shared memory to change, without polling: Linux's futex, through ctypes.

Ray's own shared-memory channels poll (`sched_yield` in a loop), so that every graph alive on a worker takes a whole core
while nothing happens. See futex(2); the words are shared between processes, so the flag for private ones is not set.
"""

from __future__ import annotations

import ctypes
import platform
import threading

from dagrl.errors import RunError

_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
_EVERYONE = 0x7FFF_FFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futexes:
    """Words of shared memory (`words` has format "I") that processes wait on. All calls let other threads run meanwhile."""

    def __init__(self, words: memoryview) -> None:
        machine = platform.machine()
        if machine not in _NUMBERS:
            raise RunError(f"compiled graphs wait on a futex, whose number on {machine} is unknown; set executor: eager")
        library = ctypes.CDLL(None, use_errno=True)
        self.let_others_run = library.sched_yield
        self._call = library.syscall
        self._number = ctypes.c_long(_NUMBERS[machine])
        self._anchor = ctypes.c_uint32.from_buffer(words)
        self._start = ctypes.addressof(self._anchor)

    def wait(self, index: int, known: int, seconds: float) -> None:
        """Sleep until someone wakes those that wait on a word; at once if it is not `known`; early on a signal."""
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        word = ctypes.c_void_p(self._start + 4 * index)
        self._call(self._number, word, _WAIT, ctypes.c_uint32(known), ctypes.byref(limit), None, 0)

    def wake(self, index: int) -> None:
        """Wake all who wait on a word, so that they look again."""
        self._call(self._number, ctypes.c_void_p(self._start + 4 * index), _WAKE, _EVERYONE, None, None, 0)


_ORDERED = platform.machine() == "x86_64"
_first, _second = threading.Lock(), threading.Lock()


def fence() -> None:
    """Order the memory accesses before it and after it; x86 keeps that order by itself (loads and stores alike)."""
    if not _ORDERED:
        with _first:
            pass
        with _second:
            pass
