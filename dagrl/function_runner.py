"""Runs a user's function of texts (a reward, an environment) in processes of its own, under a deadline.

A function that hangs (a regular expression can, holding the interpreter's lock) is killed with its process, and one that
raises costs the row it raised for: such rows are answered with `Failed`. Functions take lists of texts and return a list
(`batched`), or take one text of each list and return one answer; either may be a coroutine function. The coroutines of
single rows run side by side, and one that hangs is cancelled alone; other functions of single rows are asked row by row,
each under the deadline. A process whose first start fails makes the call a RunError, as it may be that the function cannot
be imported; a later one, in place of a process that was lost, costs the rows that waited for it.

Every call ends. Where a function fails for all rows of a call together, each of them is asked once more, alone and under
the same deadline, whatever became of those before it. A call of n rows so asks its process n + 1 times at most, and takes
at most n + 1 times `timeout_s` (`GRACE_S` more with single rows), and `start_timeout_s` as often where each time ends the
process.

    with FunctionRunner.configured("my_task:reward", "reward", config.reward, check=float) as runner:
        future = runner.submit(prompts, completions, references)       # answered beside the caller, in `workers` processes
"""

from __future__ import annotations

import inspect
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from dagrl.config import FunctionConfig
from dagrl.errors import RunError
from dagrl.imports import load_callable

GRACE_S = 1.0
"""Seconds beyond their deadline in which the process says which coroutines have missed it."""


@dataclass(frozen=True)
class Deadline:
    """Seconds that a call, or the start of a process, may take, and the key of the configuration that says so."""

    seconds: float
    key: str

    @property
    def missed(self) -> str:
        """What is said of an answer that did not come in time."""
        return f"no answer within {self.key} = {self.seconds:g} s"


@dataclass(frozen=True)
class Failed:
    """The answer to a row that the function has none for, and why."""

    message: str


Answers = list[Any]
"""One answer a row, `Failed` where there is none."""


class FunctionRunner:
    """A function in `workers` processes, which start with `start`, or with the first calls, and end with `close`."""

    def __init__(
        self,
        path: str,
        key: str,
        *,
        deadline: Deadline,
        start: Deadline,
        batched: bool = True,
        workers: int = 1,
        check: Callable[[Any], Any] = lambda answer: answer,
    ) -> None:
        """`deadline` is of one call, `start` of a process, which imports the function. `check` turns one answer into what
        the caller wants, or raises ValueError or TypeError saying what is wrong.

        Raises ConfigError when the import path leads nowhere.
        """
        function = load_callable(path, key)
        self._check = check
        self._row_by_row = not batched and not _is_coroutine(function)
        self._processes = [_FunctionProcess(path, key, batched, deadline, start) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_FunctionProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=key)

    @classmethod
    def configured(cls, path: str, section: str, config: FunctionConfig, check: Callable[[Any], Any]) -> Self:
        """The function at `path` as the configuration's `section` says; see the constructor."""
        return cls(
            path,
            f"{section}.function",
            deadline=Deadline(config.timeout_s, f"{section}.timeout_s"),
            start=Deadline(config.start_timeout_s, f"{section}.start_timeout_s"),
            batched=config.batched,
            workers=config.num_workers,
            check=check,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __call__(self, *columns: Sequence[str]) -> Answers:
        """One answer a row; rows are asked one by one where the function takes one, or fails for all together.

        Takes at most so long as the module's first lines say, once a process is free.
        """
        process = self._idle.get()
        try:
            if self._row_by_row:
                return self._one_by_one(process, columns)
            whole = process.ask(columns)
            whole = self._checked(whole, len(columns[0])) if not isinstance(whole, str) else whole
            if not isinstance(whole, str):
                return whole
            # a single row is not asked again: that would take the time, and have the effects, of two calls
            return [Failed(whole)] if len(columns[0]) == 1 else self._one_by_one(process, columns)
        finally:
            self._idle.put(process)

    def start(self) -> None:
        """Start the processes beside the caller. Where one cannot, the call that meets it says why."""
        for _ in self._processes:
            self._threads.submit(self._start_one)

    def submit(self, *columns: Sequence[str]) -> Future[Answers]:
        """The same, answered beside the caller."""
        return self._threads.submit(self, *columns)

    def close(self) -> None:
        """End the processes; calls that wait for an answer are answered with failures."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close(for_good=True)

    def _start_one(self) -> None:
        process = self._idle.get()
        try:
            process.start()
        finally:
            self._idle.put(process)

    def _one_by_one(self, process: _FunctionProcess, columns: Sequence[Sequence[str]]) -> Answers:
        """One answer a row; one that is lost costs the next one nothing but the start of another process."""
        answers: Answers = []
        for row in zip(*columns, strict=True):
            answer = process.ask([[text] for text in row])
            answer = self._checked(answer, 1) if not isinstance(answer, str) else answer
            answers.append(Failed(answer) if isinstance(answer, str) else answer[0])
        return answers

    def _checked(self, answers: Answers, rows: int) -> Answers | str:
        if len(answers) != rows:
            return f"it returned {len(answers)} answers; expected: a list of {rows}"
        try:
            return [answer if isinstance(answer, Failed) else self._check(answer) for answer in answers]
        except (TypeError, ValueError) as error:
            return str(error)


def _unpickled(answers: bytes) -> Answers | str:
    try:
        found: Answers | str = pickle.loads(answers)  # noqa: S301  # of our own process
    except Exception as error:  # whatever the user's classes raise
        return f"its answer cannot be unpickled: {type(error).__name__}: {error}"
    return found


def _is_coroutine(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class _FunctionProcess:
    """One process; started when first asked, and again after it was lost."""

    def __init__(self, path: str, key: str, batched: bool, deadline: Deadline, start: Deadline) -> None:
        self._command = [path, key, "batched" if batched else "single", str(deadline.seconds), deadline.key]
        self._deadline, self._start = deadline, start
        self._patience_s = deadline.seconds + (0.0 if batched else GRACE_S)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._failure: RunError | None = None  # of a start that nobody waited for
        self._imported = False  # by this process, or by one before it that was lost
        self._closed = False
        self._changing = threading.Lock()

    def start(self) -> None:
        """Have a process that has imported the function; what goes wrong is told by the next `ask`."""
        try:
            self._running()
        except RunError as error:
            self._failure = error
        except (EOFError, OSError):  # another try tells
            self.close()

    def ask(self, columns: Sequence[Sequence[str]]) -> Answers | str:
        """The answers to all rows, or what went wrong; where that ended the process, the next call starts another.

        Raises RunError when the function is not imported in time and never was, as it may be that it cannot be.
        """
        try:
            return self._answers(self._running(), columns)
        except RunError as error:
            if not self._imported:
                raise
            return str(error)
        except (EOFError, OSError):
            self.close()
            return "the process that runs it ended"

    def _answers(self, connection: Connection, columns: Sequence[Sequence[str]]) -> Answers | str:
        connection.send([list(column) for column in columns])
        if not connection.poll(self._patience_s):
            self.close()
            return self._deadline.missed
        return _unpickled(connection.recv_bytes())

    def close(self, *, for_good: bool = False) -> None:
        """End the process; nothing happens when there is none."""
        with self._changing:
            self._closed |= for_good
            process, connection = self._process, self._connection
            self._process = self._connection = None
        if process is not None:
            process.kill()
            process.wait()
        if connection is not None:
            connection.close()

    def _running(self) -> Connection:
        """The connection to a process that has imported the function."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        connection = self._connection
        if connection is None:
            connection = self._begin()
            if not connection.poll(self._start.seconds):
                self.close()
                raise RunError(
                    f"{self._command[1]} {self._command[0]} was not imported within {self._start.key} = "
                    f"{self._start.seconds:g} s; raise it, or have the module do less when it is imported"
                )
            connection.recv()
            self._imported = True
        return connection

    def _begin(self) -> Connection:
        """The connection to a new process."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with self._changing:
            if self._closed:
                raise EOFError
            self._connection, theirs = Pipe()
            command = [sys.executable, "-m", "dagrl.function_process", str(theirs.fileno()), *self._command]
            self._process = subprocess.Popen(  # noqa: S603  # our own module, with the user's import path
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
            theirs.close()
            return self._connection
