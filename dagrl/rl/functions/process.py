"""A child process that runs a user's function: started, asked, killed at a deadline, replaced when lost."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from dagrl.errors import RunError, error_text
from dagrl.machine import descendants_of
from dagrl.rl.functions.answers import Answers
from dagrl.runtime.deadline import Deadline

Arguments = Literal["named", "episodes", "agents"]
"""How a function is called; see `dagrl.rl.functions.child`."""

GRACE_S = 1.0
"""Seconds after the deadline in which a process reports which coroutines missed it."""

START_TRIES = 3
"""Processes in a row that may end while they import the function."""


class FunctionProcess:
    """One process, started when it is first needed and again after it was lost."""

    def __init__(
        self,
        path: str,
        key: str,
        batched: bool,
        deadline: Deadline,
        start: Deadline,
        arguments: Arguments,
        concurrency: int | None = None,
        prepare: Mapping[str, Any] | None = None,
    ) -> None:
        how = ["batched" if batched else "single", arguments, str(concurrency or 0)]
        self._command = [path, key, *how, str(deadline.seconds), deadline.key, json.dumps(prepare or {})]
        self._deadline, self._start = deadline, start
        self._batched, self._concurrency = batched, concurrency
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._blocks_s = 0.0  # how long the connection may block, without `GRACE_S`
        self._failure: RunError | None = None  # of a background start
        self.imported = False  # by this process or an earlier one
        self._lost_starts = 0  # in a row
        self._closed = False
        self._changing = threading.Lock()

    def start(self) -> None:
        """Makes sure that a process has imported the function. The next `ask` reports a failure."""
        try:
            self.connection()
        except RunError as error:
            self._failure = error
        except (EOFError, OSError):  # the next `ask` tries again
            self.close()

    def _patience_s(self, rows: int) -> float:
        """Seconds to wait for the answers to `rows` rows, of which `concurrency` are under way at once."""
        if self._batched:
            return self._deadline.seconds
        rounds = math.ceil(rows / self._concurrency) if self._concurrency else 1
        return self._deadline.seconds * max(rounds, 1) + GRACE_S

    def ask(self, columns: Sequence[Sequence[Any]], limit: Deadline | None = None) -> Answers | str:
        """Returns the answers to all rows, or what went wrong. The next call replaces a process that was lost.

        `limit` replaces the deadline for this call. Raises RunError if the function was never imported in time.
        """
        try:
            return self._answers(self.connection(), columns, limit)
        except RunError as error:
            if not self.imported:
                raise
            return str(error)
        except (EOFError, OSError):
            self.close()
            return "the process that runs it ended"

    def _answers(self, connection: Connection, columns: Sequence[Sequence[Any]], limit: Deadline | None) -> Answers | str:
        patience_s = self._patience_s(len(columns[0])) if limit is None else limit.seconds
        if patience_s != self._blocks_s:
            _limit_blocking(connection, patience_s + GRACE_S)
            self._blocks_s = patience_s
        connection.send([list(column) for column in columns])
        if connection.poll(patience_s):
            return _unpickled(connection.recv_bytes())
        self.close()
        return (limit or self._deadline).missed

    def close(self, *, final: bool = False) -> None:
        """Ends the process, if there is one; `final` prevents another. Callable from any thread.

        The connection is shut down but not closed: if another thread is in `send`, its file descriptor could belong to
        another file by the next write. It closes when the last reference goes.
        """
        with self._changing:
            self._closed |= final
            process, connection = self._process, self._connection
            self._process = self._connection = None
        if process is not None:
            _kill(process)
        if connection is not None:
            with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
                end.shutdown(socket.SHUT_RDWR)  # unblocks readers and writers even if a stray child holds the other end

    def connection(self) -> Connection:
        """Returns the connection to a process that has imported the function, starting one if necessary.

        Raises RunError if it cannot be imported, and EOFError or OSError if the process ended meanwhile.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        connection = self._connection
        if connection is None:
            connection = self._launch()
            problem = self._import_failure(connection)
            if problem is not None:
                self.close()
                raise RunError(problem)
            self.imported, self._lost_starts = True, 0
        return connection

    def _import_failure(self, connection: Connection) -> str | None:
        """Waits until a new process has imported the function; returns what went wrong, if anything.

        Raises EOFError for a process that ended meanwhile, which is tried again `START_TRIES` times.
        """
        name = f"{self._command[1]} {self._command[0]}"
        if not connection.poll(self._start.seconds):
            return (
                f"{name} was not imported within {self._start.key} = {self._start.seconds:g} s; raise it, or make the "
                "module's import faster"
            )
        try:
            failure = connection.recv()
        except (EOFError, OSError):
            self._lost_starts += 1
            if self._closed or self._lost_starts < START_TRIES:
                raise
            return (
                f"the process of {name} ended {self._lost_starts} times while it imported the function; see its output "
                "above. Expected: a module that only defines things. Check what its import does, and the machine's memory"
            )
        return None if failure is None else f"{failure}. The driver could import it, but the process that runs it could not"

    def _launch(self) -> Connection:
        """Starts a process and returns the connection to it."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with self._changing:
            if self._closed:
                raise EOFError
            self._blocks_s = 0.0
            self._connection, theirs = Pipe()
            reaper = [sys.executable, "-I", "-S", str(Path(__file__).with_name("reaper.py")), str(os.getpid())]
            child = [sys.executable, "-m", "dagrl.rl.functions.child", str(theirs.fileno()), *self._command]
            self._process = subprocess.Popen(  # noqa: S603  # our own module, with the user's import path
                [*reaper, *child],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            theirs.close()
            return self._connection


def _limit_blocking(connection: Connection, seconds: float) -> None:
    """Lets `send` and `recv_bytes` raise OSError if the process is stuck in the middle of a message for so long."""
    whole = int(seconds)
    limit = struct.pack("@ll", whole, max(int((seconds - whole) * 1e6), 1))
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _unpickled(answers: bytes) -> Answers | str:
    try:
        found: Answers | str = pickle.loads(answers)  # noqa: S301  # from our own process
    except Exception as error:  # a user's class may raise anything
        return f"its answer cannot be unpickled: {error_text(error)}"
    return found


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and all its descendants, including those in sessions of their own (`reaper.py`)."""
    process.send_signal(signal.SIGUSR1)
    try:
        process.wait(GRACE_S)
        return
    except subprocess.TimeoutExpired:  # it is stopped, or the machine is busy
        started = descendants_of(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in started:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
