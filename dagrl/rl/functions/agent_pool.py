"""Runs a user's agents in processes, under deadlines; the parent's side of `dagrl.rl.functions.agents`.

pool = AgentPool("my_task:agent", config.environment)
future = pool.submit("3/0", {"example": ..., "endpoint": ...})    # what the agent returned, or `Failed`
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from dagrl.config import EnvironmentConfig
from dagrl.rl.functions.answers import Failed
from dagrl.rl.functions.process import GRACE_S, FunctionProcess, LoopThread, LostError
from dagrl.runtime.deadline import Deadline

logger = logging.getLogger(__name__)

KEY = "environment.agent"


class AgentPool:
    """Episodes in `config.num_workers` processes, at most `config.max_concurrency` at once in each."""

    def __init__(self, path: str, config: EnvironmentConfig) -> None:
        self._deadline = Deadline(config.agent_timeout_s, "environment.agent_timeout_s")
        start = Deadline(config.start_timeout_s, "environment.start_timeout_s")
        most = config.max_concurrency or math.inf
        self._rooms = [
            _Room(FunctionProcess(path, KEY, False, self._deadline, start, "agents"), most)
            for _ in range(config.num_workers or 1)
        ]
        self._loop = LoopThread(KEY)
        self._episodes: dict[str, Future[Any]] = {}

    def start(self) -> None:
        """Starts the processes in the background. If one cannot start, the first episode says why."""
        self._loop.start()
        for room in self._rooms:
            self._loop.spawn(room.process.start())

    def submit(self, key: str, request: Mapping[str, Any], again: Callable[[], None] = lambda: None) -> Future[Any]:
        """Starts an episode. The future has what the agent returned or `Failed`, or raises RunError if it has no process.

        A process that ends loses all its episodes, mostly because of one. They start again with half of the others, then a
        quarter, until they end or one has lost a process alone. `again` is called in another thread, before each start but
        the first.
        """
        self._episodes[key] = answer = self._loop.spawn(self._answer(request, again))
        answer.add_done_callback(lambda _: self._episodes.pop(key, None))
        return answer

    def cancel(self, key: str) -> None:
        """Ends an episode, if it is under way."""
        if (episode := self._episodes.get(key)) is not None:
            episode.cancel()

    def close(self) -> None:
        """Ends the processes and all episodes."""
        for episode in list(self._episodes.values()):
            episode.cancel()
        for room in self._rooms:
            self._loop.run(room.process.close())
        self._loop.stop()

    async def _answer(self, request: Mapping[str, Any], again: Callable[[], None]) -> Any:
        room = min(self._rooms, key=lambda room: room.load)
        limit = math.inf
        while True:
            try:
                async with room.place(limit):
                    if limit < math.inf:
                        again()  # its old process is gone, and its new one waits for this
                    return await room.process.request(request, self._deadline.seconds + GRACE_S)
            except TimeoutError:
                return Failed(f"its process did not answer within {self._deadline.key} = {self._deadline.seconds:g} s")
            except LostError as error:
                if error.requests == 1:
                    return Failed(str(error))
                if error.requests:
                    logger.warning("%s: %s; one of its %d episodes starts again", KEY, error, error.requests)
                    limit = max(1, error.requests // 2)


@dataclass
class _Room:
    """A process and its episodes: `load` of them in all, `running` there, and `limits` of those that it lost before."""

    process: FunctionProcess
    most: float
    load: int = 0
    running: int = 0
    limits: list[float] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def place(self, limit: float) -> AsyncIterator[None]:
        """Waits for a place among at most `limit` episodes (inf: those that `most` allows).

        Episodes that were lost with a process go first: others wait until these have ended.
        """
        lost, running = limit < math.inf, 0
        self.load += 1
        self.limits += [limit] if lost else []
        try:
            async with self.changed:
                await self.changed.wait_for(
                    lambda: (lost or not self.limits) and self.running < min([self.most, *self.limits])
                )
                running = 1
                self.running += running
            yield
        finally:
            self.load, self.running = self.load - 1, self.running - running
            if lost:
                self.limits.remove(limit)
            async with self.changed:
                self.changed.notify_all()
