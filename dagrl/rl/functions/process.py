"""Starts a child process that runs a user's function, asks it, kills it at a deadline, and replaces it when it is lost."""

import asyncio
import itertools
import json
import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from dagrl.errors import RunError, error_text
from dagrl.machine import descendants_of
from dagrl.rl.functions.answers import Answers, place_in_dump
from dagrl.runtime.deadline import Deadline

Item = TypeVar("Item")

Arguments = Literal["named", "episodes", "agents"]  # how a function is called; see `dagrl.rl.functions.child`

ENDED = "the process that runs it ended"

GRACE_S = 1.0  # seconds after the deadline in which a process reports which coroutines missed it
START_TRIES = 3  # processes in a row that may end while they import the function

BYTES = struct.Struct("!Q")
"""The size before each message of the process. Messages to the process are pickles, one after the other."""

TRACE_BYTES = 1 << 16  # most of a traceback that is read

_READ_BYTES = 1 << 20

Columns = Sequence[Sequence[Any]]  # of the rows of a call


class LostError(Exception):
    """The process ended or was killed. `requests` is the number of requests that it had; 0 if it had not started."""

    def __init__(self, reason: str, requests: int = 1) -> None:
        super().__init__(reason)
        self.requests = requests


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def start(self) -> None:
        """Starts the loop."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the loop after what it does now."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def tasks(self) -> set[asyncio.Task[Any]]:
        """The tasks that have not ended."""
        return asyncio.all_tasks(self._loop)

    def spawn(self, call: Coroutine[Any, Any, Item]) -> Future[Item]:
        """Runs the coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def run(self, call: Coroutine[Any, Any, Item]) -> Item:
        """Returns the coroutine's result."""
        return self.spawn(call).result()


class FunctionProcess:
    """One process, started when it is first needed and again after it was lost. All calls come from one event loop."""

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
        self._batched, self._concurrency, self._cancels = batched, concurrency, arguments == "agents"
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None  # once the function is imported
        self._reading: asyncio.Task[None] | None = None
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._failure: RunError | None = None  # of a background start
        self._imported = False  # by this process or an earlier one
        self._lost_starts = 0  # in a row
        self._closed = False
        self._trace: IO[bytes] | None = None  # where the function is shortly before the deadline

    async def start(self) -> None:
        """Starts a process if there is none. The next request reports a failure."""
        try:
            await self._ready()
        except RunError as error:
            self._failure = error
        except LostError:  # the next request tries again
            pass

    async def ask(self, columns: Columns) -> Answers | str:
        """Returns the answers to all rows, or what went wrong. The next call replaces a process that was lost.

        Raises RunError if the function was never imported in time.
        """
        try:
            answers: Answers | str = await self.request([*map(list, columns)], self._seconds(len(columns[0])))
            return answers
        except TimeoutError as error:
            return self._deadline.missed + str(error)
        except LostError as error:
            return str(error)

    async def ask_together(self, calls: Sequence[Columns]) -> list[Answers | str] | None:
        """Returns what `ask` does for each of the calls, which have the time of one. None if that was too little, or the
        process was lost: it is not known by which."""
        try:
            answers = await self.request(tuple([*map(list, columns)] for columns in calls), self._deadline.seconds)
        except (TimeoutError, LostError):
            return None
        return answers if isinstance(answers, list) else None

    async def request(self, content: Any, seconds: float) -> Any:
        """Returns the answer of the process. Cancelling this cancels the request there, if it is an agent's.

        Ends the process after so many seconds and raises TimeoutError, which has the function's line. Raises LostError if it
        ends, RunError if the function was never imported in time.
        """
        try:
            await self._ready()
        except RunError as error:
            if self._imported:
                raise LostError(str(error)) from error
            raise
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            async with asyncio.timeout(seconds):
                await self._send((number, content))
                return _unpickled(await answer)
        except TimeoutError:
            self._pending.pop(number, None)
            place = "" if self._trace is None else place_in_dump(os.pread(self._trace.fileno(), TRACE_BYTES, 0).decode())
            await self._end()
            raise TimeoutError(place) from None
        except asyncio.CancelledError:
            if self._cancels:
                with suppress(LostError):
                    await self._send((number, None))
            raise
        finally:
            self._pending.pop(number, None)

    async def close(self) -> None:
        """Ends the process for good."""
        self._closed = True
        await self._end()

    def _seconds(self, rows: int) -> float:
        """Seconds to wait for the answers to `rows` rows, of which `concurrency` are under way at once."""
        if self._batched:
            return self._deadline.seconds
        rounds = math.ceil(rows / self._concurrency) if self._concurrency else 1
        return self._deadline.seconds * max(rounds, 1) + GRACE_S

    async def _ready(self) -> None:
        """Starts a process unless there is one. Raises RunError if it cannot import the function, LostError if it ends."""
        async with self._starting:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            if self._writer is None:
                reader, writer = await self._launch()
                try:
                    await self._check_import(reader)
                except BaseException:
                    writer.close()
                    await self._end()
                    raise
                self._imported, self._lost_starts, self._writer = True, 0, writer
                self._reading = asyncio.create_task(self._read(reader))

    async def _launch(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._closed:
            raise LostError(ENDED)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        ours, theirs = socket.socketpair()
        self._trace = tempfile.TemporaryFile()  # `_end` closes it
        reaper = [sys.executable, "-I", "-S", str(Path(__file__).with_name("reaper.py")), str(os.getpid())]
        descriptors = theirs.fileno(), self._trace.fileno()
        child = [sys.executable, "-m", "dagrl.rl.functions.child", *map(str, descriptors), *self._command]
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220, S603  # returns at once; our own module
                [*reaper, *child],
                pass_fds=descriptors,
                env=environment,
                stdin=subprocess.DEVNULL,
                process_group=0,  # in the driver's session, with which Linux shares processors
            )
        return await asyncio.open_unix_connection(sock=ours, limit=_READ_BYTES)

    async def _check_import(self, reader: asyncio.StreamReader) -> None:
        name = f"{self._command[1]} {self._command[0]}"
        try:
            async with asyncio.timeout(self._start.seconds):
                failure = pickle.loads(await _received(reader))  # noqa: S301  # from our own process
        except TimeoutError:
            raise RunError(
                f"{name} was not imported within {self._start.key} = {self._start.seconds:g} s; raise it, or make the "
                "module's import faster"
            ) from None
        except (EOFError, OSError) as error:
            self._lost_starts += 1
            if self._closed or self._lost_starts < START_TRIES:
                raise LostError(ENDED, int(self._closed)) from error
            raise RunError(
                f"the process of {name} ended {self._lost_starts} times while it imported the function; see its output "
                "above. Expected: a module that only defines things. Check what its import does, and the machine's memory"
            ) from error
        if failure is not None:
            raise RunError(f"{failure}. The driver could import it, but the process that runs it could not")

    async def _send(self, message: object) -> None:
        if self._writer is None:
            raise LostError(ENDED)
        self._writer.write(pickle.dumps(message))
        try:
            await self._writer.drain()
        except OSError as error:
            raise LostError(ENDED, len(self._pending)) from error

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, content = pickle.loads(await _received(reader))  # noqa: S301  # from our own process
                if (answer := self._pending.get(number)) is not None and not answer.done():
                    answer.set_result(content)
        self._reading = None
        await self._end()

    async def _end(self) -> None:
        """Ends the process, if there is one. Its requests raise LostError."""
        process, self._process, writer, self._writer = self._process, None, self._writer, None
        lost = [answer for answer in self._pending.values() if not answer.done()]
        self._pending.clear()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if writer is not None:
            writer.transport.abort()
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        if process is not None:
            await asyncio.to_thread(_kill, process)
        for answer in lost:
            if not answer.done():  # by a deadline or a cancellation meanwhile
                answer.set_exception(LostError(ENDED, len(lost)))


async def _received(reader: asyncio.StreamReader) -> bytes:
    (size,) = BYTES.unpack(await reader.readexactly(BYTES.size))
    return await reader.readexactly(size)


def _unpickled(answer: bytes) -> Any:
    try:
        return pickle.loads(answer)  # noqa: S301  # from our own process
    except Exception as error:  # a user's class may raise anything
        return f"its answer cannot be unpickled: {error_text(error)}"


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
