"""Agents in rollouts: their requests become sequences to generate, and their conversations rows to train on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dagrl.data.media import RowMedia
from dagrl.data.tokenization import Prompt
from dagrl.rl.agents.conversations import EpisodeRows, Row
from dagrl.rl.agents.episode import AgentEpisode, Turn as Request
from dagrl.rl.agents.runner import AgentRunner, agent_rewards
from dagrl.rl.environments import FAILED, example_of
from dagrl.rl.generation import FinishedRequest
from dagrl.rl.rewards import ENVIRONMENT
from dagrl.rl.rollout.episodes import ABORTED, TOKEN_FIELDS, Episode, RolloutGroup, Sample, Turn, request_seeds
from dagrl.rl.rollout.scoring import environment_failures, rendered_differently

logger = logging.getLogger(__name__)

SEEDED = 1 << 32
"""Streams of the seeds that clients ask for. Other requests count from 0."""


SHOWN = 80
"""Characters of a conversation's start that a warning shows, in addition to the prompt's."""


@dataclass
class TurnEpisode(Episode):
    """A request of an agent as a sequence: its prompt is the whole conversation so far."""

    turn: Request | None = None

    @property
    def cancelled(self) -> bool:
        return self.turn is not None and self.turn.cancelled


@dataclass(frozen=True)
class _Running:
    group: RolloutGroup
    episode: Episode
    agent: AgentEpisode


class AgentTurns:
    """Takes turns from agents. See `dagrl.rl.rollout.turns.Turns`."""

    can_wait = False  # clients wait for them

    def __init__(self, runner: AgentRunner) -> None:
        self._runner = runner
        self._running: dict[int, _Running] = {}  # by id() of the agent's episode
        self._begun = 0
        self._warned = self._warned_of_prompt = False

    @property
    def awaited(self) -> list[Future[Any]]:
        """Empty if no agent runs."""
        answers = [running.agent.answer for running in self._running.values()]
        return [self._runner.inbox.news, *answers] if answers else []

    def start(self, groups: Iterable[RolloutGroup]) -> list[Turn]:
        """Starts an agent for each sequence of the groups, which begins afresh."""
        for group in groups:
            for episode in group.episodes:
                key, self._begun = f"{group.number}/{self._begun}", self._begun + 1
                example = example_of(episode.prompt, episode.seed, group.episodes[0].seed, self._runner.media)
                agent = self._runner.begin(key, example, greedy=episode.greedy)
                self._running[id(agent)] = _Running(group, episode, agent)
        return []  # they have to ask first

    def take(self) -> list[Turn]:
        """Ends the sequences whose agents have returned. Returns the requests that have come since the last call."""
        for key, running in list(self._running.items()):
            if running.agent.answer.done():
                del self._running[key]
                self._end(running, running.agent.answer.result())
        turns: list[Turn] = []
        for agent, turn in self._runner.inbox.take():
            if id(agent) in self._running and not turn.cancelled:
                running = self._running[id(agent)]
                media = _row_media(turn.context.shown()) if self._runner.media is not None else None
                prompt = Prompt("", np.array(turn.prompt, np.int64), "", running.episode.prompt.source, media=media)
                stream = turn.number if turn.seed is None else SEEDED + abs(turn.seed)
                (seed,) = request_seeds(running.episode.seed, stream, 1)
                episode = TurnEpisode(prompt, seed, turn.max_new_tokens, options=turn.options, turn=turn)
                turns.append((running.group, episode))
        return turns

    def finish(self, ended: Sequence[tuple[Turn, FinishedRequest]]) -> None:
        """Answers the requests."""
        for (_, episode), result in ended:
            assert isinstance(episode, TurnEpisode) and episode.turn is not None
            tokens, logprobs, versions = (column.tolist() for column in (episode.tokens, episode.logprobs, episode.versions))
            episode.turn.finish(FinishedRequest(result.request_id, tokens, logprobs, versions, result.finish_reason))

    def abort(self, group: RolloutGroup) -> None:
        for key, running in list(self._running.items()):
            if running.group is group:
                del self._running[key]
                self._runner.end(running.agent)
                running.episode.finish_reason = ABORTED

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Returns failures, and how much of the episodes is trained on."""
        return {
            **environment_failures(samples),
            "environment/conversations": float(np.mean([len(sample.rows) for sample in samples])),
            "environment/untrained_tokens": float(sum(sample.completion.untrained for sample in samples)),
            **rendered_differently([row for sample in samples for row in sample.rows]),
        }

    def _end(self, running: _Running, answer: Any) -> None:
        self._runner.end(running.agent)
        rewards, failure = agent_rewards(answer)
        rows = running.agent.rows(self._runner.max_conversations)
        if not rows.rows and not failure:
            failure = "the agent returned without an answer of the policy"
        prompt = running.episode.prompt
        if prompt.messages and not self._warned_of_prompt and _renders_again(prompt.text, rows):
            self._warned_of_prompt = True
            logger.warning(
                "an agent sends example['prompt'] as a message, so the chat template renders it twice: %r. Send "
                "example['messages'] (warned once)",
                rows.rows[0].text[: len(prompt.text) + SHOWN],
            )
        set_conversations(running.episode, rows, rewards)
        for episode, row in zip([running.episode, *running.episode.more], rows.rows, strict=False):
            if not all(row.sampled):
                episode.renders_again = self._runner.renderer.renders_again(row)
        running.episode.turns = running.agent.answers
        if failure:
            running.episode.failure, running.episode.finish_reason = failure, FAILED
        if rows.untrained and not self._warned:
            self._warned = True
            logger.warning(
                "%d tokens of an agent's episode are not trained on: they are in more than environment.max_conversations = "
                "%d conversations, or were sampled with another temperature or top_p than the run's (warned once)",
                rows.untrained,
                self._runner.max_conversations,
            )


def _renders_again(prompt: str, rows: EpisodeRows) -> bool:
    """Whether a message of an agent contains the example's prompt as the chat template renders it."""
    return any(prompt.strip() in str(message.get("content")) for row in rows.rows for message in row.messages)


def set_conversations(episode: Episode, conversations: EpisodeRows, rewards: dict[str, float]) -> None:
    """Makes `episode` the first of its agent's conversations, with the others in `more` and `others`."""
    rows, episode.others = (
        [_conversation(episode.prompt, row) for row in part] for part in (conversations.rows, conversations.others)
    )
    episode.more = rows[1:]
    episode.untrained, episode.finish_reason = conversations.untrained, "stop"
    episode.reward_parts = {name or ENVIRONMENT: reward for name, reward in rewards.items()}
    if rows:
        first = rows[0]
        episode.prompt, episode.finish_reason = first.prompt, first.finish_reason
        episode.tokens, episode.logprobs = first.tokens, first.logprobs
        episode.versions, episode.sampled, episode.media = first.versions, first.sampled, first.media


def _row_media(media: Sequence[int]) -> RowMedia | None:
    return RowMedia((), np.array(media, np.int64)) if any(media) else None


def _conversation(example: Prompt, row: Row) -> Episode:
    """Returns a conversation as an episode: its own prompt, and the other fields of the example."""
    tokens, media = np.array(row.prompt, np.int64), _row_media(row.shown)
    prompt = replace(example, text=row.text, tokens=tokens, messages=tuple(row.messages), media=media)
    columns: dict[str, Any] = {name: getattr(row, name) for name in TOKEN_FIELDS}
    return Episode(prompt, 0, 0, **columns, finish_reason=row.finish_reason)
