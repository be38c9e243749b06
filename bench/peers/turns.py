"""A side of `bench peers` in a process of its own: it builds its case, and then takes steps when it is told to.

    with Side("dagrl.bench.peers.trl_sft", order, log) as side:
        side.begin(deadline_s)
        side.ready(deadline_s)
        seconds = side.take(case, 4, deadline_s)

The process calls `serve(work)`, or uses a `Told` where a library owns the loop.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import IO, TypeVar, cast

from dagrl.bench.peers.case import PeerCase, SideOrder
from dagrl.errors import RunError

END_S = 30.0
"""How long a side has to end by itself."""

T = TypeVar("T")
Take = Callable[[PeerCase, int], list[float]]
"""Takes a number of steps of a case and returns the seconds of each."""


class Side:
    """The benchmark's end: starts `python -m module`, whose output goes to `log`, and talks to it."""

    def __init__(self, module: str, order: SideOrder, log: Path) -> None:
        self.module, self.order, self.log = module, order, log
        self.notes: dict[str, float] = {}  # what else the side measured, as of its last answer

    def __enter__(self) -> Side:
        key = secrets.token_hex(16)
        self._listener = Listener(("127.0.0.1", 0), authkey=key.encode())
        host, port = self._listener.address
        environment = {**os.environ, "DAGRL_SIDE": f"{host}:{port}:{key}:{time.monotonic()}", "PYTHONUNBUFFERED": "1"}
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

    def begin(self, deadline_s: float) -> None:
        """Waits for the process and tells it what to build. Raises RunError if it ends or takes longer than `deadline_s`."""
        arrived: list[Connection] = []
        accepting = threading.Thread(target=lambda: arrived.append(self._listener.accept()), daemon=True)
        accepting.start()
        until = time.monotonic() + deadline_s
        while accepting.is_alive() and time.monotonic() < until and self._process.poll() is None:
            accepting.join(0.2)
        if not arrived:
            raise RunError(f"{self.module} did not connect within {deadline_s:.0f} s; {self._last_words()}")
        self._connection = arrived[0]
        self._connection.send(self.order)

    def ready(self, deadline_s: float) -> None:
        """Waits until the side has built its cases. Raises RunError if it fails or takes longer than `deadline_s`."""
        self._answer(deadline_s)

    def take(self, case: PeerCase, steps: int, deadline_s: float) -> list[float]:
        """Returns the seconds of `steps` steps. Raises RunError if the side fails or takes longer than `deadline_s`."""
        assert self._connection is not None
        self._connection.send((case, steps))
        return cast("list[float]", self._answer(deadline_s))

    def _answer(self, deadline_s: float) -> object:
        assert self._connection is not None
        try:
            if not self._connection.poll(max(deadline_s, 0.0)):
                raise RunError(f"{self.module} did not answer in time; {self._last_words()}")
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
        if self._connection is not None:
            with suppress(OSError):  # it may have ended
                self._connection.send(None)
        else:
            self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
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
        self.order = cast("SideOrder", self._connection.recv())
        self.notes: dict[str, float] = {}  # sent with every answer

    def turn(self) -> tuple[PeerCase, int] | None:
        """Waits for the next turn; returns its case and number of steps, None at the end."""
        return cast("tuple[PeerCase, int] | None", self._connection.recv())

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
