"""Environments of episodes in a child process: made, reset, stepped and closed, many at once.

An episode's state lives in the process. A request has the texts of all turns so far: a process that does not know the
episode, because an earlier one was lost or the run was resumed, makes it again and steps through them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

THREADS = 256
"""Plain methods under way at once in a process."""


@dataclass(frozen=True)
class Step:
    """What an environment says of a turn: its reply (None: the episode has ended), and the turn's reward if it has one.

    A reply is a text, or messages for the chat template, after which the template opens the policy's next turn.
    """

    reply: str | list[dict[str, Any]] | None = None
    reward: float | None = None


@dataclass
class _Episode:
    environment: Any
    steps: int = 0


class EpisodeHost:
    """The episodes of a process, by key. Call it with a key and a request, or with None to close the episode."""

    def __init__(self, factory: Callable[..., Any]) -> None:
        self._factory = factory
        self._episodes: dict[str, _Episode] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="episode")

    async def __call__(self, key: str, request: Mapping[str, Any] | None) -> Any:
        """Steps through the turns that the episode has not seen. Returns the answer to the last."""
        if request is None:
            return await self._close(key)
        try:
            answer = await self._step(key, request)
        except BaseException:
            self._episodes.pop(key, None)  # in an unknown state
            raise
        if answer is None or (isinstance(answer, Step) and answer.reply is None):
            await self._close(key)
        return answer

    async def _step(self, key: str, request: Mapping[str, Any]) -> Any:
        turns = request["turns"]
        episode = self._episodes.get(key)
        if episode is None or episode.steps >= len(turns):  # unknown, or its last answer was lost
            await self._close(key)
            episode = _Episode(await self._call(self._factory, **request["arguments"]))
            self._episodes[key] = episode
            await self._call(episode.environment.reset, request["example"])
        answer = None
        for turn in turns[episode.steps :]:
            answer = await self._call(episode.environment.step, turn)
            episode.steps += 1
        return answer

    async def _close(self, key: str) -> None:
        episode = self._episodes.pop(key, None)
        if episode is not None and hasattr(episode.environment, "close"):
            await self._call(episode.environment.close)

    async def _call(self, method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Awaits a coroutine method, or calls a plain one in a thread, so that the other episodes continue."""
        if inspect.iscoroutinefunction(method):
            return await method(*arguments, **keywords)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: method(*arguments, **keywords))
