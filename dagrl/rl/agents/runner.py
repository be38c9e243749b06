"""Runs agents, with the endpoint that they talk to and the processes that they run in.

with AgentRunner(config, tokenizer) as agents:
    episode = agents.begin("3/0", example)
    agents.inbox.take()            # requests for generation, as they come; `agents.inbox.news` says when
    episode.answer.result()        # what the agent returned
    episode.rows(1)                # its conversations
"""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Self

from dagrl.config import Config
from dagrl.config.settings import bucket_widths, generation_config
from dagrl.errors import printable
from dagrl.rl.agents.episode import AgentEpisode, Limits
from dagrl.rl.agents.protocol import MODEL
from dagrl.rl.agents.rendering import Renderer
from dagrl.rl.agents.server import EndpointServer, Inbox
from dagrl.rl.functions.agent_pool import AgentPool
from dagrl.rl.functions.answers import Failed
from dagrl.rl.media import RolloutMedia
from dagrl.runtime.deadline import Deadline

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
            environment.endpoint.host,
            environment.endpoint.port,
            self.renderer,
            self._limits,
            self.inbox,
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
