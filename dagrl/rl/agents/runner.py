"""Runs agents, with the endpoint that they talk to and the processes that they run in.

with AgentRunner(config, tokenizer) as agents:
    episode = agents.begin("3/0", example)
    agents.inbox.take()            # requests for generation, as they come; `agents.inbox.news` says when
    episode.answer.result()        # what the agent returned
    episode.rows(1)                # its conversations
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Self

from dagrl.config import Config, EnvironmentConfig
from dagrl.config.settings import bucket_widths, generation_config
from dagrl.errors import printable
from dagrl.rl.agents.episode import AgentEpisode, Limits
from dagrl.rl.agents.protocol import MODEL
from dagrl.rl.agents.rendering import Renderer
from dagrl.rl.agents.server import EndpointServer, Inbox
from dagrl.rl.functions.answers import Failed
from dagrl.rl.functions.process import GRACE_S, FunctionProcess, LoopThread, LostError
from dagrl.rl.media import RolloutMedia
from dagrl.runtime.deadline import Deadline

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)
KEY = "environment.agent"


class AgentRunner:
    """See the module's docstring. A context manager."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerFast, media: RolloutMedia | None = None) -> None:
        """With `media`, requests may have images. Raises ConfigError for a wrong import path."""
        self.media = media
        environment, generation = config.environment, generation_config(config)
        assert environment.agent is not None
        self.max_conversations = environment.max_conversations
        self._limits = Limits(
            bucket_widths(config.policy)[-1],
            generation.max_new_tokens,
            environment.max_turns,
            generation.temperature,
            generation.top_p,
            generation.stop_strings,
        )
        self.inbox = Inbox()
        own = media and replace(media, processor=copy.deepcopy(media.processor))  # as its tokenizer
        self.renderer = Renderer(copy.deepcopy(tokenizer), environment.tool_parser, generation.stop_token_ids, own)
        self._server = EndpointServer(
            environment.endpoint.host, environment.endpoint.port, self.renderer, self._limits, self.inbox
        )
        self._stop = Deadline(config.timeouts.teardown_s, "timeouts.teardown_s")
        self._pool = AgentPool(environment.agent, environment)

    def __enter__(self) -> Self:
        self._server.start()
        self._pool.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for episode in list(self._server.episodes.values()):
            self.end(episode, "the run has ended")
        self._pool.close()
        self._server.stop(self._stop)

    def begin(self, key: str, example: Mapping[str, Any], *, greedy: bool = False) -> AgentEpisode:
        """Starts an episode. A `greedy` one takes the likeliest tokens, unless its requests ask for a temperature."""
        episode = AgentEpisode(key, f"dagrl-{secrets.token_hex(16)}", self._limits, greedy=greedy)
        self._server.episodes[episode.api_key] = episode
        endpoint = {"base_url": self._server.base_url, "api_key": episode.api_key, "model": MODEL}

        def again() -> None:
            episode.restart()
            self.inbox.wake()

        episode.answer = self._pool.submit(key, {"example": dict(example), "endpoint": endpoint}, again)
        return episode

    def end(self, episode: AgentEpisode, why: str = "the episode has ended") -> None:
        """Ends an episode, whether or not its agent has returned."""
        del self._server.episodes[episode.api_key]
        episode.end(why)
        if not episode.answer.done():
            self._pool.cancel(episode.key)


def agent_rewards(answer: Any) -> tuple[dict[str, float], str]:
    """Returns an agent's rewards by name ("" for a plain number), and an error message if its result is invalid."""
    if isinstance(answer, Failed):
        return {}, answer.message
    rewards = answer if isinstance(answer, dict) else {} if answer is None else {"": answer}
    for name, value in rewards.items():
        if not isinstance(name, str) or not isinstance(value, Real) or not math.isfinite(value):
            return {}, printable(f"it returned {answer!r:.200}; expected: a number, numbers by name, or None")
    return {name: float(value) for name, value in rewards.items()}, ""


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
