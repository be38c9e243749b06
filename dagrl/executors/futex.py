"""Waiting for a word of shared memory to change, without polling: Linux's futex, through ctypes.

Ray's own shared-memory channels poll (`sched_yield` in a loop), so that every graph alive on a worker takes a whole core
while nothing happens. Who waits here looks for a while, if messages come often and there is a core for it, and then sleeps.
See futex(2); the words are shared between processes, so the flag for private ones is not set.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import threading
import time

from dagrl.errors import RunError
from dagrl.executors.memory import EdgeClosedError, EdgeTimeoutError

_LARGE = len(os.sched_getaffinity(0)) >= 16
SHORT_SPIN_S = 30e-6
LONG_SPIN_S = 20e-3 if _LARGE else 200e-6
SOON_S = 20e-3 if _LARGE else 400e-6
"""How long to look for a message before sleeping: long if the last one came soon, else short. Waking a sleeper takes 50 to
200 us, so back-to-back replays stay awake, and a worker whose next replay is far away sleeps at once. Soon must exceed the
time of a chain of sleepers (of 64 on a large machine), or the chain never wakes. On a small machine the one who looks takes
the core of the one who is to send."""

LOST_CORE_S = 1e-3 if _LARGE else math.inf
"""One who looks and finds so much time gone since the last look has lost the core to another, who needs it more."""
GIVE_WAY_S = (20e-3, 2.0)
"""How long to sleep at once then instead of looking: at first, and at most, when the core is lost again and again."""

let_others_run = ctypes.CDLL(None).sched_yield
"""Give the core to another process, or thread of this one, that wants it."""

_LOOK_S = 0.5  # how long to sleep before looking again whether the edge was closed

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


class Patience:
    """How long one who waits looks before sleeping: long if the last message came soon, and nobody else wants the core.

    With more who look than cores, each would wait a scheduler's slice of milliseconds for the others, and all for the last
    of them. So whoever loses the core gives way for a while, with all edges of its process.
    """

    _give_way_until = 0.0
    _give_way_s = GIVE_WAY_S[0]

    def __init__(self) -> None:
        self.seconds = SHORT_SPIN_S

    def looked(self, before: float) -> float:
        """The time now, after a look; infinitely late if the core was lost since `before`."""
        now = time.perf_counter()
        if now - before < LOST_CORE_S:
            return now
        least, most = GIVE_WAY_S
        again = before - Patience._give_way_until < Patience._give_way_s
        Patience._give_way_s = min(2 * Patience._give_way_s, most) if again else least
        Patience._give_way_until = now + Patience._give_way_s
        return math.inf

    def came(self, started: float) -> None:
        """A message came that was waited for since `started`."""
        now = time.perf_counter()
        soon = now - started < SOON_S and now >= Patience._give_way_until
        self.seconds = LONG_SPIN_S if soon else SHORT_SPIN_S

    def lose(self) -> None:
        """No message came in time: whoever waits on in short turns does not look for long in each of them."""
        self.seconds = SHORT_SPIN_S


class Watch:
    """Waits for words of one memory, whose word `closed` says whether it is still in use."""

    def __init__(self, words: memoryview, futexes: Futexes, closed: int) -> None:
        self._words = words
        self._futexes = futexes
        self._closed = closed
        self._patience = Patience()

    def check_open(self) -> None:
        """Raise EdgeClosedError if the memory is in use no more."""
        if self._words[self._closed]:
            raise EdgeClosedError("this edge was closed")

    def wait(self, index: int, known: int, timeout_s: float | None) -> None:
        """Return once a word is no longer `known`. Raises EdgeTimeoutError, EdgeClosedError."""
        words, closed = self._words, self._closed
        if words[index] != known and not words[closed]:
            return
        started = now = time.perf_counter()
        until = started + self._patience.seconds
        while words[index] == known and not words[closed] and now < until:
            let_others_run()
            now = self._patience.looked(now)
        while words[index] == known or words[closed]:
            self._sleep(index, known, started, timeout_s)
        self._patience.came(started)

    def _sleep(self, index: int, known: int, started: float, timeout_s: float | None) -> None:
        self.check_open()
        left = _LOOK_S if timeout_s is None else started + timeout_s - time.perf_counter()
        if left <= 0:
            self._patience.lose()
            raise EdgeTimeoutError("no message in time")
        self._futexes.wait(index, known, min(left, _LOOK_S))


class Pause:
    """Waiting for room: a reader acknowledges without waking anybody, so the writer looks now and then."""

    def __init__(self, timeout_s: float | None, late: str) -> None:
        self._until = None if timeout_s is None else time.perf_counter() + timeout_s
        self._late = late
        self._pause_s = 50e-6

    def take(self) -> None:
        """Let some time pass. Raises EdgeTimeoutError at the end of the time."""
        if self._until is not None and time.perf_counter() >= self._until:
            raise EdgeTimeoutError(self._late)
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, 2e-3)


_ORDERED = platform.machine() == "x86_64"
_first, _second = threading.Lock(), threading.Lock()


def fence() -> None:
    """Order the memory accesses before it and after it; x86 keeps that order by itself (loads and stores alike)."""
    if not _ORDERED:
        with _first:
            pass
        with _second:
            pass
