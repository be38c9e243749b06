"""Runs a user's function of texts (a reward, an environment) in processes of its own, under a deadline.

A function that hangs (a regular expression can, holding the interpreter's lock) is killed with its process, and one that
raises costs the row it raised for: such rows are answered with `Failed`. Functions take lists of texts and return a list
(`batched`), or take one text of each list and return one answer; either may be a coroutine function. The coroutines of
single rows run side by side, and one that hangs is cancelled alone; other functions of single rows are asked row by row,
each under the deadline. A process whose first start fails makes the call a RunError, as it may be that the function cannot
be imported; a later one, in place of a process that was lost, costs the rows that waited for it.

Every call ends. Where a function fails for all rows of a call together, each of them is asked once more, alone and under
the same deadline, or an equal share of what `call_timeout_s` leaves for those that are still to be asked, where that is
less: rows that hang take no more from the others, and those that answer sooner leave it to them. Rows whose turn does not
come before the time is over fail. So a call takes `call_timeout_s`, with the processes that start anew within it, and
the start of one process more. A function that takes single rows, and is no coroutine function, has
`timeout_s` for each (and `GRACE_S`), and n times that for n rows, unless it is given a `call_timeout_s` too.

    with FunctionRunner.configured("my_task:reward", "reward", config.reward, check=float) as runner:
        future = runner.submit(prompts, completions, references)       # answered beside the caller, in `workers` processes
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self, TypeVar

from dagrl.config import FunctionConfig
from dagrl.deadline import Deadline
from dagrl.errors import RunError, error_text
from dagrl.imports import load_callable
from dagrl.machine import descendants_of

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

GRACE_S = 1.0
"""Seconds beyond their deadline in which the process says which coroutines have missed it."""

CALL_TIMEOUTS = 4
"""A call with what is asked again in it takes so many times `timeout_s` at most, where `call_timeout_s` is not given."""

LEAST_SHARE = 0.1
"""Of `timeout_s`: what a row has that is asked alone, however many there are."""


@dataclass(frozen=True)
class Failed:
    """The answer to a row that the function has none for, and why."""

    message: str


Answers = list[Any]
"""One answer a row, `Failed` where there is none."""


def split_answered(items: Iterable[Item], answer: Callable[[Item], Future[Any]]) -> tuple[list[Item], list[Item]]:
    """Those whose future is done, and those that still wait. Each is looked at once: it may be done a moment later."""
    answered: list[Item] = []
    waiting: list[Item] = []
    for item in items:
        (answered if answer(item).done() else waiting).append(item)
    return answered, waiting


class FunctionRunner:
    """A function in `workers` processes, which start with `start`, or with the first calls, and end with `close`."""

    def __init__(
        self,
        path: str,
        key: str,
        *,
        deadline: Deadline,
        start: Deadline,
        whole: Deadline | None = None,
        batched: bool = True,
        workers: int = 1,
        check: Callable[[Any], Any] = lambda answer: answer,
    ) -> None:
        """`deadline` is of one answer, `start` of a process, which imports the function, `whole` of a call with all that is
        asked again in it (None: `CALL_TIMEOUTS`, or no bound for single rows that are no coroutines). `check` turns one
        answer into what the caller wants, or raises ValueError or TypeError saying what is wrong.

        Raises ConfigError when the import path leads nowhere.
        """
        function = load_callable(path, key)
        self._key, self._check = key, check
        self._warned: set[str] = set()
        self._row_by_row = not batched and not is_coroutine(function)
        if whole is None and not self._row_by_row:
            whole = deadline.times(CALL_TIMEOUTS)
        self._deadline, self._whole = deadline, whole
        self._processes = [_FunctionProcess(path, key, batched, deadline, start) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_FunctionProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=key)

    @classmethod
    def configured(cls, path: str, section: str, config: FunctionConfig, check: Callable[[Any], Any]) -> Self:
        """The function at `path` as the configuration's `section` says; see the constructor."""
        call_s = config.call_timeout_s
        return cls(
            path,
            f"{section}.function",
            deadline=Deadline(config.timeout_s, f"{section}.timeout_s"),
            start=Deadline(config.start_timeout_s, f"{section}.start_timeout_s"),
            whole=None if call_s is None else Deadline(call_s, f"{section}.call_timeout_s"),
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
            process.start()
            until = time.monotonic() + self._whole.seconds if self._whole else math.inf
            if self._row_by_row:
                return self._one_by_one(process, columns, until)
            whole = process.ask(columns)
            whole = self._checked(whole, len(columns[0])) if not isinstance(whole, str) else whole
            if not isinstance(whole, str):
                return whole
            # a single row is not asked again: that would take the time, and have the effects, of two calls
            return [Failed(whole)] if len(columns[0]) == 1 else self._asked_again(process, columns, until, whole)
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

    def _asked_again(
        self, process: _FunctionProcess, columns: Sequence[Sequence[str]], until: float, message: str
    ) -> Answers:
        """`_one_by_one`, with a warning where nobody else would tell that the call failed as a whole: no row does alone."""
        answers = self._one_by_one(process, columns, until)
        if message not in self._warned and not any(isinstance(answer, Failed) for answer in answers):
            self._warned.add(message)
            logger.warning(
                "%s fails for samples together and answers each of them alone, which takes longer: %s (said once)",
                self._key,
                message,
            )
        return answers

    def _one_by_one(self, process: _FunctionProcess, columns: Sequence[Sequence[str]], until: float) -> Answers:
        """One answer a row, as far as there is time `until` then (`time.monotonic`); each row left has its share of it.

        A share leaves out what starting processes anew has taken by row so far; it is `LEAST_SHARE` of `timeout_s` at least.
        """
        answers: Answers = []
        rows = list(zip(*columns, strict=True))
        starts_s = 0.0
        for place, row in enumerate(rows):
            began = time.monotonic()
            if began < until:
                process.start()  # in place of one that was lost
            now = time.monotonic()
            left_s, starts_s = until - now, starts_s + (now - began if place else 0.0)
            share_s = left_s / (len(rows) - place) - starts_s / max(place, 1)
            least_s = LEAST_SHARE * self._deadline.seconds
            answer = self._ask_row(process, row, min(max(share_s, least_s), left_s)) if left_s > 0 else self._not_asked()
            answers.append(Failed(answer) if isinstance(answer, str) else answer[0])
        return answers

    def _ask_row(self, process: _FunctionProcess, row: Sequence[str], share_s: float) -> Answers | str:
        """Its answer, or what went wrong, within its share of the call's time where that is less than its own."""
        limit = None
        if self._whole is not None and share_s < self._deadline.seconds:
            limit = Deadline(round(share_s, 3), f"what {self._whole.key} left for it")
        answer = process.ask([[text] for text in row], limit)
        return answer if isinstance(answer, str) else self._checked(answer, 1)

    def _not_asked(self) -> str:
        assert self._whole is not None
        return f"its turn to be asked alone did not come within {self._whole.key} = {self._whole.seconds:g} s"

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
        return f"its answer cannot be unpickled: {error_text(error)}"
    return found


def is_coroutine(function: Callable[..., Any]) -> bool:
    """Whether calling it makes a coroutine, as far as can be known before."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With all that is in its session, and children, and theirs, that began sessions of their own."""
    started = descendants_of(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in started:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


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

    def ask(self, columns: Sequence[Sequence[str]], limit: Deadline | None = None) -> Answers | str:
        """The answers to all rows, or what went wrong; where that ended the process, the next call starts another.

        `limit`: a deadline for this time that is sooner than its own.

        Raises RunError when the function is not imported in time and never was, as it may be that it cannot be.
        """
        try:
            return self._answers(self._running(), columns, limit)
        except RunError as error:
            if not self._imported:
                raise
            return str(error)
        except (EOFError, OSError):
            self.close()
            return "the process that runs it ended"

    def _answers(self, connection: Connection, columns: Sequence[Sequence[str]], limit: Deadline | None) -> Answers | str:
        patience_s = self._patience_s if limit is None else limit.seconds
        stuck = threading.Timer(patience_s + GRACE_S, self.close)  # it reads or writes half of a message: that raises then
        stuck.start()
        try:
            connection.send([list(column) for column in columns])
            if connection.poll(patience_s):
                return _unpickled(connection.recv_bytes())
        finally:
            stuck.cancel()
            stuck.join()  # it may have begun: the process is then lost now, and not in the middle of the next call
        self.close()
        return (limit or self._deadline).missed

    def close(self, *, for_good: bool = False) -> None:
        """End the process, from any thread; nothing happens when there is none.

        The connection closes when nobody holds it. Closed here, in the middle of another thread's `send`, its descriptor
        could be another file's by the time of the next write.
        """
        with self._changing:
            self._closed |= for_good
            process, connection = self._process, self._connection
            self._process = self._connection = None
        if process is not None:
            _kill(process)
        if connection is not None:
            with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
                end.shutdown(socket.SHUT_RDWR)  # fails who reads or writes, though a stray child may hold the other end

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
            failure = connection.recv()
            if failure is not None:
                self.close()
                raise RunError(f"{failure}. The driver could import it; the process that is to run it could not")
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
