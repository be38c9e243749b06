"""Deadlines that know the configuration key that sets them, so that errors can name it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

MISSED = "no answer within"  # the start of what a missed deadline says


@dataclass(frozen=True)
class Deadline:
    """Seconds that a call, or the start of a process, may take, and the configuration key that sets them."""

    seconds: float
    key: str

    @property
    def missed(self) -> str:
        return f"{MISSED} {self.key} = {self.seconds:g} s"

    def times(self, factor: int) -> Deadline:
        return Deadline(factor * self.seconds, f"{factor} * {self.key}")


def within(seconds: float, call: Callable[[], T], name: str) -> T:
    """Runs `call` on a thread called `name` and returns what it returns, or raises what it raises.

    For calls that may block without end. Raises TimeoutError after `seconds`; the thread continues and its outcome is lost.
    """
    return in_background(call, name).result(seconds)


def in_background(call: Callable[[], T], name: str) -> Future[T]:
    """Runs `call` on a thread called `name`, which does not keep the process alive."""
    outcome: Future[T] = Future()
    threading.Thread(target=_settle, args=(outcome, call), name=name, daemon=True).start()
    return outcome


class BackgroundThread:
    """A daemon thread that runs one call after the other, until `close`. It takes a call faster than a new thread starts."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_run_all, args=(self._calls,), name=name, daemon=True).start()

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Runs `call` after the earlier ones."""
        outcome: Future[T] = Future()
        self._calls.put(partial(_settle, outcome, call))
        return outcome

    def close(self) -> None:
        """Ends the thread after the last call."""
        self._calls.put(None)


def _run_all(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it may hold what its caller has dropped


def _settle(outcome: Future[T], call: Callable[[], T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(error)
