"""Processes that run a user's agents, under deadlines; the parent's side of `dagrl.rl.functions.agents`.

pool = AgentPool("my_task:agent", config.environment)
future = pool.submit("3/0", {"example": ..., "endpoint": ...})    # what the agent returned, or `Failed`
"""

from __future__ import annotations

import logging
import math
import pickle
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from dagrl.config import EnvironmentConfig
from dagrl.errors import RunError
from dagrl.rl.functions.answers import Failed
from dagrl.rl.functions.process import GRACE_S, FunctionProcess
from dagrl.runtime.deadline import Deadline

logger = logging.getLogger(__name__)

KEY = "environment.agent"

ENDED = "the process that runs it ended"

POLL_S = 0.5
"""Seconds between two checks of the deadlines of a process that does not answer."""


@dataclass(eq=False)
class _Episode:
    """`company` is the most episodes that run in its process: fewer after each process that was lost with it.

    `again` is called before it starts again.
    """

    key: str
    request: Mapping[str, Any]
    again: Callable[[], None]
    answer: Future[Any]
    until: float = math.inf
    company: float = math.inf
    lost: bool = False


class AgentPool:
    """Episodes in `config.num_workers` processes, at most `config.max_concurrency` at once in each."""

    def __init__(self, path: str, config: EnvironmentConfig) -> None:
        self._processes = [_AgentProcess(path, config) for _ in range(config.num_workers)]

    def start(self) -> None:
        """Starts the processes in the background. If one cannot start, the first episode says why."""
        for process in self._processes:
            process.start()

    def submit(self, key: str, request: Mapping[str, Any], again: Callable[[], None] = lambda: None) -> Future[Any]:
        """Starts an episode. The future has what the agent returned or `Failed`, or raises RunError if it has no process.

        A process that ends loses all its episodes, mostly because of one. They start again with half of the others, then a
        quarter, until they end or one has lost a process alone. `again` is called in another thread, before each start but
        the first.
        """
        episode = _Episode(key, request, again, Future())
        min(self._processes, key=lambda process: process.load).submit(episode)
        return episode.answer

    def cancel(self, key: str) -> None:
        """Ends an episode, if it is under way, without an answer."""
        for process in self._processes:
            process.cancel(key)

    def close(self) -> None:
        """Ends the processes and with them all episodes."""
        for process in self._processes:
            process.close()


class _AgentProcess:
    """A process, with a thread that writes to it and one that reads its answers. A lost process is replaced."""

    def __init__(self, path: str, config: EnvironmentConfig) -> None:
        self._deadline = Deadline(config.agent_timeout_s, "environment.agent_timeout_s")
        start = Deadline(config.start_timeout_s, "environment.start_timeout_s")
        self._process = FunctionProcess(path, KEY, False, self._deadline, start, "agents")
        self._most = config.max_concurrency or math.inf
        self._lock = threading.Lock()
        self._waiting: dict[str, _Episode] = {}
        self._running: dict[str, _Episode] = {}
        self._connection: Connection | None = None
        self._lost: Connection | None = None  # the last one that was given up
        self._closed = False
        self._outbox: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=KEY, daemon=True)

    @property
    def load(self) -> int:
        """Episodes that wait or run."""
        return len(self._waiting) + len(self._running)

    def start(self) -> None:
        self._writer.start()
        self._outbox.put(("", None))  # starts the process

    def submit(self, episode: _Episode) -> None:
        with self._lock:
            self._waiting[episode.key] = episode
            self._send_next()

    def cancel(self, key: str) -> None:
        with self._lock:
            if self._waiting.pop(key, None) is None and self._running.pop(key, None) is not None:
                self._outbox.put((key, None))
                self._send_next()

    def close(self) -> None:
        self._closed = True
        self._outbox.put(None)
        self._process.close(final=True)

    def _send_next(self) -> None:
        """Moves waiting episodes to the process while it has room. Called with the lock."""
        while self._waiting:
            key, episode = next(iter(self._waiting.items()))
            if len(self._running) >= min(self._most, *(one.company for one in (episode, *self._running.values()))):
                return
            self._running[key] = self._waiting.pop(key)
            self._outbox.put((key, episode.request))

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._deliver(*message)
            except RunError as error:
                self._end_unsent(Failed(str(error)) if self._process.imported else error, message[0])
            except (EOFError, OSError):  # closed
                self._end_unsent(Failed(ENDED), message[0])

    def _deliver(self, key: str, request: Any) -> None:
        """Sends a message, unless its episode was cancelled. The deadline of an episode begins now."""
        while True:
            connection = self._connect()
            with self._lock:
                if connection is self._lost:
                    continue
                new, self._connection = connection is not self._connection, connection
                episode = self._running.get(key)
                if episode is not None:
                    episode.until = time.monotonic() + self._deadline.seconds + GRACE_S
                break
        if new:
            threading.Thread(target=self._read, args=(connection,), name=KEY, daemon=True).start()
        if episode is None and (request is not None or not key):
            return
        if episode is not None and episode.lost:
            episode.again()  # its old process is gone, and its new one waits for this
        try:
            connection.send((key, request))
        except OSError:
            self._lose(connection, ENDED)

    def _connect(self) -> Connection:
        """Returns the connection to a process that has imported the agent."""
        while True:
            try:
                return self._process.connection()
            except (EOFError, OSError):  # a RunError after several processes in a row
                self._process.close()
                if self._closed:
                    raise

    def _try_again(self, lost: Sequence[_Episode]) -> list[_Episode]:
        """Lets episodes that a process lost wait before all others; returns those that have exceeded their deadline."""
        now = time.monotonic()
        overdue = [one for one in lost if one.until < now]
        again = {one.key: one for one in lost if one.until >= now}
        for one in again.values():
            one.until, one.lost, one.company = math.inf, True, max(1, len(lost) // 2)
        self._waiting = again | self._waiting
        logger.warning("%s: %s; its %d episodes start again", KEY, ENDED, len(again))
        return overdue

    def _read(self, connection: Connection) -> None:
        failure = ENDED
        try:
            while True:
                if connection.poll(POLL_S):
                    self._end(*pickle.loads(connection.recv_bytes()))  # noqa: S301  # from our own process
                elif self._overdue():
                    failure = f"its process did not answer within {self._deadline.key} = {self._deadline.seconds:g} s"
                    break
        except (EOFError, OSError):
            pass
        self._lose(connection, failure)

    def _overdue(self) -> bool:
        with self._lock:
            return min((episode.until for episode in self._running.values()), default=math.inf) < time.monotonic()

    def _end(self, key: str, answer: Any) -> None:
        with self._lock:
            episode = self._running.pop(key, None)
            self._send_next()
        if episode is not None:
            episode.answer.set_result(answer)

    def _lose(self, connection: Connection, failure: str) -> None:
        """Gives up a process, once: the thread that reads and the one that writes may both find that it has ended.

        Its episodes have failed; if they are several, those that may not be why it was lost are tried again.
        """
        with self._lock:
            if connection is not self._connection:
                return
            self._process.close()
            self._connection, self._lost = None, connection
            lost = [one for one in self._running.values() if one.until < math.inf]
            for episode in lost:
                del self._running[episode.key]
            failed = self._try_again(lost) if len(lost) > 1 else lost
            self._send_next()
        for episode in failed:
            episode.answer.set_result(Failed(failure))

    def _end_unsent(self, outcome: Failed | RunError, key: str) -> None:
        """Ends the episode `key`, for which there is no process, or with a RunError all."""
        with self._lock:
            if isinstance(outcome, RunError):
                ended = [*self._running.values(), *self._waiting.values()]
                self._running.clear()
                self._waiting.clear()
            else:
                ended = [self._running.pop(key)] if key in self._running else []
                self._send_next()
        for episode in ended:
            if isinstance(outcome, RunError):
                episode.answer.set_exception(outcome)
            else:
                episode.answer.set_result(outcome)
