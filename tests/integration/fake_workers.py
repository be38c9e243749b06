"""Fake workers: test doubles that record what is asked of them, for tests of the runtime alone."""

import os
import threading
import time
from typing import Any

import numpy as np

from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker import WorkerContext, current_replay, in_warmup
from tests.unit.runtime.doubles import Unreadable

ENGINES: dict[str, Any] = {
    "dagrl": {"executor": "compiled"},
    "ray": {"executor": "compiled", "engine": "ray"},
    "eager": {"executor": "eager"},
}
"""Options of a Scheduler for everything that runs phases."""


class FakeWorker:
    """Remembers the order of its calls; can raise, hang, die, or wait for one that does, on request."""

    def __init__(self, context: WorkerContext, config: object) -> None:
        self.context, self.config = context, config
        self.calls: list[str] = []
        self.aborted = False
        self.released = threading.Event()

    def setup(self, address: str) -> None:
        self.address = address

    def abort(self) -> None:
        self.aborted = True
        self.released.set()

    def double(self, batch: Batch) -> Batch:
        self._record("double")
        return Batch({"lengths": batch["lengths"], "doubled": batch["tokens"] * 2})

    def first(self, parts: list[Batch]) -> Batch:
        return parts[0]

    def shard_tokens(self, batch: Batch, scale: int = 1) -> int:
        self._record("shard_tokens")
        return int(batch["lengths"].sum()) * scale

    def total(self, parts: list[int]) -> int:
        return sum(parts)

    def rank(self, value: object) -> int:
        self._record(f"rank:{value}")
        return self.context.rank

    def add_one(self, value: int) -> int:
        return value + 1

    def slow(self, until: float | str) -> str:
        """Takes so many seconds, or until there is a file of that name."""
        self._record(f"slow:{current_replay().replay}")
        if isinstance(until, str):
            while not os.path.exists(until):
                time.sleep(0.01)
        else:
            time.sleep(until)
        return "done"

    def misbehave(self, how: dict[str, object]) -> object:
        if self.context.rank == how.get("rank"):
            if how["kind"] == "raise":
                raise ValueError("the fake worker was told to raise")
            if how["kind"] == "echo":
                return how["value"]
            if how["kind"] == "unreadable":
                return Unreadable()
            if how["kind"] == "die":
                os.kill(os.getpid(), 9)
            if how["kind"] == "hang":
                time.sleep(3600)
        elif how.get("peers") == "wait":  # as in a collective, which an abort breaks
            self.released.wait(3600)
            raise RuntimeError("aborted")
        elif "seconds" in how:
            time.sleep(float(str(how["seconds"])))
        return self.context.rank

    def large(self, size: int) -> np.ndarray:
        return np.zeros(size, dtype=np.uint8)

    def history(self) -> list[str]:
        return list(self.calls)

    def was_aborted(self) -> bool:
        return self.aborted

    def _record(self, what: str) -> None:
        if not in_warmup():
            self.calls.append(what)
