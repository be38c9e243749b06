"""Environments of episodes in a child process, many at once.

An episode's state lives in the process. A request has the texts of all turns so far, none before the first turn. A process
that does not know the episode, because an earlier one was lost, makes it again and steps through them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dagrl.errors import error_text
from dagrl.rl.functions.answers import without_exit

if TYPE_CHECKING:
    from dagrl.config import ImagesConfig

logger = logging.getLogger(__name__)

THREADS = 256  # plain methods that run at once in a process


@dataclass(frozen=True)
class Step:
    """An environment's answer to a turn: its reply (None: the episode has ended), and the turn's reward if it has one.

    A reply is a text, or messages for the chat template, after which the template opens the policy's next turn. A message
    may have images among its parts (`data.images.enabled`): files, bytes, data URLs, or images of Pillow.
    """

    reply: str | list[dict[str, Any]] | None = None
    reward: float | None = None


@dataclass
class _Episode:
    environment: Any
    steps: int = 0


def _with_images(answer: Any, limits: ImagesConfig) -> Any:
    """Returns an answer whose images are read. Raises DataError if one is broken."""
    from dagrl.rl.media import read_messages

    reply = answer.reply if isinstance(answer, Step) else answer
    if not isinstance(reply, list) or not all(isinstance(message, dict) for message in reply):
        return answer
    read = read_messages(reply, limits, "the reply")
    return replace(answer, reply=read) if isinstance(answer, Step) else read


class EpisodeHost:
    """The episodes of a process, by key. Call it with a key and a request, or with None to close the episode."""

    def __init__(self, factory: Callable[..., Any]) -> None:
        self._factory = factory
        self._episodes: dict[str, _Episode] = {}
        self._closing: set[asyncio.Task[None]] = set()  # the loop keeps only weak references
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="episode")

    async def __call__(self, key: str, request: Mapping[str, Any] | None) -> Any:
        """Steps through the turns that the episode has not seen. Returns the answer to the last, or else that of `reset`."""
        if request is None:
            return await self._close(key)
        try:
            answer = await self._step(key, request)
        except BaseException:
            # It is in an unknown state, and to close it may hang or fail too.
            closing = asyncio.get_running_loop().create_task(self._close_failed(key))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            raise
        if request["turns"] and (answer is None or (isinstance(answer, Step) and answer.reply is None)):
            await self._close(key)
        return answer

    async def _step(self, key: str, request: Mapping[str, Any]) -> Any:
        turns = request["turns"]
        episode, answer = self._episodes.get(key), None
        if episode is None or episode.steps >= len(turns):  # unknown, or its last answer was lost
            await self._close(key)
            episode = _Episode(await self._call(self._factory, **request["arguments"]))
            self._episodes[key] = episode
            answer = await self._call(episode.environment.reset, request["example"])
        for turn in turns[episode.steps :]:
            answer = await self._call(episode.environment.step, turn)
            episode.steps += 1
        limits = request.get("images")
        return answer if limits is None else await self._call(_with_images, answer, limits)

    async def _close_failed(self, key: str) -> None:
        try:
            await self._close(key)
        except Exception as error:
            logger.warning("environment.function: close failed after an episode failed: %s", error_text(error))

    async def _close(self, key: str) -> None:
        episode = self._episodes.pop(key, None)
        if episode is not None and hasattr(episode.environment, "close"):
            await self._call(episode.environment.close)

    async def _call(self, method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Awaits a coroutine method, or calls a plain one in a thread, so that the other episodes continue."""
        with without_exit():
            if inspect.iscoroutinefunction(method):
                return await method(*arguments, **keywords)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, lambda: method(*arguments, **keywords))
