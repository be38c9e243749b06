"""Stops a run on request: by Ctrl-C, SIGTERM or the end of its terminal.

The running replay ends, a checkpoint is saved, and the run exits.
"""

import logging
import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from dagrl.errors import DeadlineError, RunError, StopRequestedError, WorkerError

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORK_HANDLERS = ("_acquireLock", "_releaseLock")
_RETRY_S = 0.05


class StopSignal:
    """Whether a stop was requested. `check` raises where a loop may be left. `saves`: a checkpoint is saved then."""

    def __init__(self, saves: bool = True) -> None:
        self.requested = False
        self._saves = saves
        self._at_once = False
        self._process = os.getpid()

    def check(self) -> None:
        """Raises StopRequestedError if a stop was requested."""
        if self.requested:
            resume = "; to resume, run the same command with checkpointing.resume=true" if self._saves else ""
            raise StopRequestedError("stopped on request" + resume)

    def listen(self) -> None:
        """Installs the signal handlers; call it again after `ray.init`, which replaces SIGTERM's. Main thread only."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores it
                    signal.signal(number, self._request)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Lets the first signal interrupt the block at once: for long parts with nothing to save yet."""
        self.check()
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _request(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # in a forked child before exec; this process stops it
            return
        if number == signal.SIGHUP:
            _leave_terminal()
            if self.requested:  # both the shell and the kernel send it when a terminal closes
                return
        interrupts = self.requested or self._at_once
        if interrupts and _cannot_raise(frame):
            threading.Timer(_RETRY_S, signal.raise_signal, [number]).start()
            return
        if interrupts:
            self.requested = True
            raise KeyboardInterrupt
        self.requested = True
        saved = "the last finished step is saved" if self._saves else "nothing is saved (checkpointing.enabled is false)"
        logger.warning("stopping after this replay; %s (signal again to stop at once)", saved)


def _leave_terminal() -> None:
    """Drops what this process writes to its terminal from now on. It is gone, and writing would fail."""
    with open(os.devnull, "wb") as nowhere:
        for output in (1, 2):
            with suppress(OSError):  # closed
                if stat.S_ISCHR(os.fstat(output).st_mode):
                    os.dup2(nowhere.fileno(), output)


def _cannot_raise(frame: FrameType | None) -> bool:
    """Returns whether Python would ignore an exception raised here.

    Around a fork it calls the functions that acquire and release the lock of `logging`, and ignores their errors. The lock
    would stay acquired, and the next log call would block.
    """
    return frame is not None and frame.f_globals.get("__name__") == "logging" and frame.f_code.co_name in _FORK_HANDLERS


def keep_handlers() -> None:
    """Sets the handlers of Python again for the signals of which native code has taken them away. Main thread only."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)


@contextmanager
def ignoring_signals() -> Iterator[None]:
    """Ignores the signals during the block, which is short and must not be left half-way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def given_up(stop: StopSignal, may_stop: bool) -> dict[str, float]:
    """Returns the metrics of a validation that a stop has ended: none. With `may_stop` it raises StopRequestedError."""
    if may_stop:
        stop.check()
    logger.warning("a validation was given up, as the run stops; its step has no validation metrics")
    return {}


@contextmanager
def no_restart_after_stop(stop: StopSignal) -> Iterator[None]:
    """Turns a failure during a requested stop into RunError, after which nothing restarts."""
    try:
        yield
    except (WorkerError, DeadlineError) as error:
        if not stop.requested:
            raise
        raise RunError(f"while it was stopping on request: {error}") from error


@contextmanager
def stop_on_signals(*, saves: bool = True) -> Iterator[StopSignal]:
    """Sets `StopSignal.requested` on the first of the signals; a second one interrupts at once."""
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
