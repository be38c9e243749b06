"""Waits for a word of shared memory to change without polling: Linux's futex, called through ctypes.

Ray's shared-memory channels poll (`sched_yield` in a loop), so every live graph takes a whole core of each worker while
nothing happens. Readers here spin briefly, if messages come often and a core is free, and then sleep. See futex(2). The
words are shared between processes, so the flag for private futexes is not set.
"""

import ctypes
import math
import os
import platform
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from dagrl.errors import RunError
from dagrl.runtime.edges.memory import EdgeClosedError, EdgeTimeoutError

_LARGE = len(os.sched_getaffinity(0)) >= 16
SHORT_SPIN_S = 30e-6
LONG_SPIN_S = 20e-3 if _LARGE else 200e-6
SOON_S = 20e-3 if _LARGE else 400e-6
"""Spin time before readers sleep: `LONG_SPIN_S` if the last message came within `SOON_S`, else `SHORT_SPIN_S`.
Waking a sleeper takes 50 to 200 us. So back-to-back replays stay awake, and a worker whose next replay is far away sleeps
at once. `SOON_S` must exceed the time of a chain of sleepers (64 of them on a large machine), or the chain never wakes.
On a small machine a spinning reader takes the core that the writer needs.
"""

LOST_CORE_S = 1e-3 if _LARGE else math.inf
"""If a spinning reader finds this much time gone since it last looked, another process took its core."""
GIVE_WAY_S = (20e-3, 2.0)
"""Seconds that it then sleeps instead of spinning: the first time, and at most if it loses the core repeatedly."""

let_others_run = ctypes.CDLL(None).sched_yield  # yields the core to another process, or another thread of this one
_LOOK_S = 0.5  # longest sleep before the next look at the closed flag

_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
_EVERYONE = 0x7FFF_FFFF

T = TypeVar("T")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Patience:
    """The spin time of a reader: long if the last message came soon and no other process wants the core.

    If more processes spin than there are cores, each waits for the others by scheduler slices of milliseconds, and all wait
    for the last. So a process that loses the core stops spinning for a while, on all its edges.
    """

    _give_way_until = 0.0
    _give_way_s = GIVE_WAY_S[0]

    def __init__(self) -> None:
        self.seconds = SHORT_SPIN_S

    def looked(self, before: float) -> float:
        """Returns the time after a look; infinity if the core was lost since `before`."""
        now = time.perf_counter()
        if now - before < LOST_CORE_S:
            return now
        least, most = GIVE_WAY_S
        again = before - Patience._give_way_until < Patience._give_way_s
        Patience._give_way_s = min(2 * Patience._give_way_s, most) if again else least
        Patience._give_way_until = now + Patience._give_way_s
        return math.inf

    def came(self, started: float) -> None:
        """Records that a message came after a wait that began at `started`."""
        now = time.perf_counter()
        soon = now - started < SOON_S and now >= Patience._give_way_until
        self.seconds = LONG_SPIN_S if soon else SHORT_SPIN_S

    def lose(self) -> None:
        """Records that no message came in time, so that the next wait spins only briefly."""
        self.seconds = SHORT_SPIN_S


class Watch:
    """Waits for words of one shared memory (`words` has format "I"). Its word `closed` is not 0 once it is closed.

    System calls release the interpreter lock.
    """

    def __init__(self, words: memoryview, closed: int) -> None:
        machine = platform.machine()
        if machine not in _NUMBERS:
            raise RunError(f"compiled graphs need futex(2), whose number on {machine} is unknown; set executor: eager")
        self._words, self._closed = words, closed
        self._patience = Patience()
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._number = ctypes.c_long(_NUMBERS[machine])
        self._anchor = ctypes.c_uint32.from_buffer(words)
        self._start = ctypes.addressof(self._anchor)

    def wake(self, index: int) -> None:
        """Wakes all processes that wait on the word, so that they look at it again."""
        self._call(self._number, ctypes.c_void_p(self._start + 4 * index), _WAKE, _EVERYONE, None, None, 0)

    def check_open(self) -> None:
        """Raises EdgeClosedError if the memory is closed."""
        if self._words[self._closed]:
            raise EdgeClosedError("this edge was closed")

    def wait(self, index: int, known: int, timeout_s: float | None) -> None:
        """Returns once the word is not `known`. Raises EdgeTimeoutError, EdgeClosedError."""
        words, closed = self._words, self._closed
        if words[index] != known and not words[closed]:
            return
        started = now = time.perf_counter()
        until = started + min(self._patience.seconds, math.inf if timeout_s is None else timeout_s)
        while words[index] == known and not words[closed] and now < until:
            let_others_run()
            now = self._patience.looked(now)
        while words[index] == known or words[closed]:
            self._sleep(index, known, started, timeout_s)
        self._patience.came(started)

    def _sleep(self, index: int, known: int, started: float, timeout_s: float | None) -> None:
        """Sleeps until the word is woken. Returns at once if it is not `known`, and early on a signal."""
        self.check_open()
        left = _LOOK_S if timeout_s is None else started + timeout_s - time.perf_counter()
        if left <= 0:
            self._patience.lose()
            raise EdgeTimeoutError("no message in time")
        seconds = min(left, _LOOK_S)
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        word = ctypes.c_void_p(self._start + 4 * index)
        self._call(self._number, word, _WAIT, ctypes.c_uint32(known), ctypes.byref(limit), None, 0)


def pause_until(look: Callable[[], T | None], timeout_s: float | None, late: str) -> T:
    """Returns what `look` finds, once that is not None. Raises EdgeTimeoutError, with the text `late`, after `timeout_s`.

    Sleeps between looks, longer each time: readers acknowledge messages without waking the writer.
    """
    until = math.inf if timeout_s is None else time.perf_counter() + timeout_s
    pause_s = 50e-6
    while (result := look()) is None:
        if time.perf_counter() >= until:
            raise EdgeTimeoutError(late)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 2e-3)
    return result


_ORDERED = platform.machine() == "x86_64"
_first, _second = threading.Lock(), threading.Lock()


def fence() -> None:
    """Orders the memory accesses before it and after it. x86 keeps that order itself, for loads and for stores."""
    if not _ORDERED:
        with _first:
            pass
        with _second:
            pass
