"""Stopping on request: Ctrl-C or SIGTERM lets the running replay end, saves, and leaves in order."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dagrl.errors import DeadlineError, RunError, WorkerError

logger = logging.getLogger(__name__)


SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OF_FORKS = ("_acquireLock", "_releaseLock")
_AGAIN_S = 0.05


class StopRequestedError(Exception):
    """Raised at the first safe point after a stop was asked for; not an error of the run."""


class StopSignal:
    """Whether a stop was asked for; `check` raises at the points where a loop may be left. `saves`: a checkpoint, then."""

    def __init__(self, saves: bool = True) -> None:
        self.requested = False
        self._saves = saves
        self._at_once = False
        self._process = os.getpid()

    def check(self) -> None:
        """Raise StopRequestedError if a stop was asked for."""
        if self.requested:
            goes_on = "; the same command with checkpointing.resume=true goes on from here" if self._saves else ""
            raise StopRequestedError("stopped on request" + goes_on)

    def listen(self) -> None:
        """Take the signals; again after `ray.init`, which takes SIGTERM for itself. Does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._request)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, the first signal interrupts too: for parts that take long and in which there is nothing to save yet."""
        self.check()
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _request(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child that has not become another program yet, and is this process's to end
            return
        interrupts = self.requested or self._at_once
        if interrupts and _cannot_raise(frame):
            threading.Timer(_AGAIN_S, signal.raise_signal, [number]).start()
            return
        if interrupts:
            self.requested = True
            raise KeyboardInterrupt
        self.requested = True
        saved = "the last finished step is saved" if self._saves else "nothing is saved (checkpointing.enabled is false)"
        logger.warning("stopping after this replay; %s (once more to stop at once)", saved)


def _cannot_raise(frame: FrameType | None) -> bool:
    """Whether an exception from here would be lost: around a fork Python calls the functions that take and give back the
    lock of `logging`, and ignores what they raise. The lock would stay taken, and whoever logs next wait for ever."""
    return frame is not None and frame.f_globals.get("__name__") == "logging" and frame.f_code.co_name in _OF_FORKS


@contextmanager
def failing_for_good(stop: StopSignal) -> Iterator[None]:
    """A failure inside, while a stop is asked for, is the run's last: RunError, after which nothing starts again."""
    try:
        yield
    except (WorkerError, DeadlineError) as error:
        if not stop.requested:
            raise
        raise RunError(f"while it was stopping on request: {error}") from error


@contextmanager
def stop_on_signals(*, saves: bool = True) -> Iterator[StopSignal]:
    """Turn the first SIGINT or SIGTERM into `StopSignal.requested`; a second one interrupts at once."""
    stop = StopSignal(saves)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    stop.listen()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
