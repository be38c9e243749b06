"""A side of a comparison in a process of its own: it builds its case, and then takes steps when it is told to.

    with Side("dagrl.bench.peers.trl_sft", order, log, deadline) as side:
        side.begin()
        side.ready()
        seconds = side.take(case, 4)

The process calls `serve(work)`, or uses a `Told` where a library owns the loop.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar, cast

from dagrl.bench.deadline import TIME_IS_UP
from dagrl.errors import RunError

LONGEST_S = 400.0
"""How long a side may take to start, to build its cases, and to take a turn."""

END_S = 30.0
"""How long a side has to end by itself."""

CLOSE_S = 3.0
"""Part of a deadline in which sides end instead of working."""

T = TypeVar("T")
Take = Callable[[Any, int], list[float]]
"""Takes a number of steps of a case and returns the seconds of each."""


class Side:
    """The benchmark's end: starts `python -m module`, whose output goes to `log`, and talks to it.

    Every wait ends `CLOSE_S` before `deadline`, a reading of the monotonic clock, with RunError; the process ends by then.
    No wait takes longer than `longest_s`. `variables` are added to the environment.
    """

    def __init__(
        self,
        module: str,
        order: object,
        log: Path,
        deadline: float = math.inf,
        longest_s: float | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.module, self.order, self.log, self._deadline = module, order, log, deadline
        self._longest_s, self._variables = longest_s or LONGEST_S, variables or {}
        self.notes: dict[str, float] = {}  # what else the side measured, as of its last answer

    def __enter__(self) -> Side:
        key = secrets.token_hex(16)
        self._listener = Listener(("127.0.0.1", 0), authkey=key.encode())
        host, port = self._listener.address
        environment = {
            **os.environ,
            **self._variables,
            "DAGRL_SIDE": f"{host}:{port}:{key}:{time.monotonic()}",
            "PYTHONUNBUFFERED": "1",
        }
        self._connection: Connection | None = None
        self._output: IO[bytes] = self.log.open("ab")
        self._process = subprocess.Popen(  # noqa: S603  # a module of this package
            [sys.executable, "-m", self.module],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self

    def begin(self) -> None:
        """Waits for the process and tells it what to build. Raises RunError if it ends or is late."""
        arrived: list[Connection] = []
        accepting = threading.Thread(target=lambda: arrived.append(self._listener.accept()), daemon=True)
        accepting.start()
        until = time.monotonic() + self._left()
        while accepting.is_alive() and time.monotonic() < until and self._process.poll() is None:
            accepting.join(0.2)
        if not arrived:
            self._late("connect")
        self._connection = arrived[0]
        self.tell(self.order)

    def ready(self) -> None:
        """Waits until the side has built its cases. Raises RunError if it fails or is late."""
        self.answer()

    def take(self, case: object, steps: int) -> list[float]:
        """Returns the seconds of `steps` steps. Raises RunError if the side fails or is late."""
        self.tell((case, steps))
        return cast("list[float]", self.answer())

    def tell(self, message: object) -> None:
        """Tells the side what to do next, after `begin`."""
        assert self._connection is not None
        self._connection.send(message)

    def _left(self) -> float:
        return max(0.0, min(self._longest_s, self._deadline - CLOSE_S - time.monotonic()))

    def _late(self, doing: str) -> NoReturn:
        if not self._left():
            raise RunError(TIME_IS_UP)
        raise RunError(f"{self.module} did not {doing} within {self._longest_s:.0f} s; {self._last_words()}")

    def answer(self) -> Any:
        """Returns the side's answer. Raises RunError if it fails or is late."""
        assert self._connection is not None
        try:
            if not self._connection.poll(self._left()):
                self._late("answer")
            error, value, self.notes = self._connection.recv()
        except (EOFError, OSError) as broken:
            raise RunError(f"{self.module} ended; {self._last_words()}") from broken
        if error:
            raise RunError(f"{self.module} failed:\n{error}")
        return value

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        return "the end of its output:\n" + "\n".join(lines)

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends the process. A second call does nothing."""
        if self._connection is not None:
            with suppress(OSError):  # it may have ended
                self._connection.send(None)
        else:
            self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, min(END_S, self._deadline - time.monotonic())))
        with suppress(ProcessLookupError):  # its session, which it leads, has children of its own
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listener.close()
        self._output.close()


class Told:
    """The side's end: what it is told, and its answers. Use it directly where a library owns the loop."""

    def __init__(self) -> None:
        host, port, key, begun = os.environ.pop("DAGRL_SIDE").split(":")
        self._begun = float(begun)
        self._connection = Client((host, int(port)), authkey=key.encode())
        self.order: Any = self._connection.recv()  # a SideOrder of `bench peers`
        self.notes: dict[str, float] = {}  # sent with every answer

    def turn(self) -> Any:
        """Waits for the next turn; returns its case and number of steps, or what `tell` was given; None at the end."""
        return self._connection.recv()

    def answer(self, value: object = None) -> None:
        """Answers `ready`, or a turn. Notes how long the start took, next to those of other sides."""
        self.notes.setdefault("start_s", round(time.monotonic() - self._begun, 1))
        self._connection.send((None, value, self.notes))

    def fail(self) -> None:
        """Answers with the exception that is being handled."""
        self._connection.send((traceback.format_exc(), None, {}))


def serve(work: Callable[[Told], None]) -> None:
    """Runs a side. What `work` raises goes to the benchmark and ends the process with code 1."""
    told = Told()
    try:
        work(told)
    except Exception:
        told.fail()
        raise


def take_turns(told: Told, take: Take) -> None:
    """Says that the cases are built, and takes turns until the end."""
    told.answer()
    while (turn := told.turn()) is not None:
        told.answer(take(*turn))
