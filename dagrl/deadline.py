"""How long something may take, together with the key of the configuration that says so: errors name both."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Deadline:
    """Seconds that a call, or the start of a process, may take, and the key that sets them."""

    seconds: float
    key: str

    @property
    def missed(self) -> str:
        """What is said of an answer that did not come in time."""
        return f"no answer within {self.key} = {self.seconds:g} s"

    def times(self, factor: int) -> Deadline:
        """A multiple of it."""
        return Deadline(factor * self.seconds, f"{factor} * {self.key}")


def within(seconds: float, call: Callable[[], T], name: str) -> T:
    """What `call` returns or raises, for calls that may wait without end; it runs on a thread that is called `name`.

    Raises TimeoutError after `seconds`; the thread then goes on, and nobody hears of it.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome.result(seconds)
