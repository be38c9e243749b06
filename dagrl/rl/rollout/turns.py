"""Sources of turns: an environment or none (`EnvironmentTurns`), or agents (`AgentTurns`).

with open_turns(config, tokenizer) as turns:
    ready = turns.start(groups)     # begins sequences; returns those whose turn can be generated
    turns.finish(ended)             # turns that were generated
    ready = turns.take()            # the next ones
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dagrl.config import Config
from dagrl.config.settings import bucket_widths, generation_config
from dagrl.data.chat import chat_of
from dagrl.data.media import MediaProcessor, RowMedia
from dagrl.data.replies import reply_row, text_tokens
from dagrl.data.tokenization import Prompt
from dagrl.errors import UserError
from dagrl.rl.agents.conversations import EpisodeRows, Row
from dagrl.rl.agents.episode import AgentEpisode, Turn as Request
from dagrl.rl.agents.runner import AgentRunner, agent_rewards
from dagrl.rl.environments import FAILED, EnvironmentRunner, Question, Reply, example_of, prompt_messages
from dagrl.rl.functions.answers import split_done
from dagrl.rl.generation import FinishedRequest, IntArray
from dagrl.rl.media import RolloutMedia
from dagrl.rl.rewards import ENVIRONMENT
from dagrl.rl.rollout.episodes import ABORTED, TOKEN_FIELDS, Episode, RolloutGroup, Sample, Turn, request_seeds
from dagrl.rl.rollout.scoring import environment_failures, rendered_differently

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)
SEEDED = 1 << 32  # streams of the seeds that clients ask for. Other requests count from 0

SHOWN = 80  # characters of a conversation's start that a warning shows, in addition to the prompt's


class Turns(Protocol):
    """Decides which sequences generate next. Not thread-safe."""

    can_wait: bool
    """Whether unfinished sequences may wait here, and move to another engine."""

    @property
    def awaited(self) -> list[Future[Any]]:
        """Futures to wait for while there is nothing to generate: `take` may have turns once one is done."""

    def start(self, groups: Iterable[RolloutGroup]) -> list[Turn]:
        """Starts the sequences of groups. Returns those that can be generated now."""

    def take(self) -> list[Turn]:
        """Returns the other sequences whose next turn can be generated, each once. Others may have ended."""

    def finish(self, ended: Sequence[tuple[Turn, FinishedRequest]]) -> None:
        """Takes turns that have ended, whose tokens are appended. Each sequence ends, or is in a later `take`."""

    def abort(self, group: RolloutGroup) -> None:
        """Ends the sequences of a group."""

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Returns metrics of a batch; none without an environment."""


@contextmanager
def open_turns(
    config: Config, tokenizer: PreTrainedTokenizerFast, processor: MediaProcessor | None = None
) -> Iterator[Turns]:
    """Opens the configured source of turns. With the model's `processor`, they may have images."""
    media = None if processor is None else RolloutMedia.of(config, processor)
    if config.environment.agent is not None:
        with AgentRunner(config, tokenizer, media) as agents:
            yield AgentTurns(agents)
    elif config.environment.enabled:
        with EnvironmentRunner(config.environment, tokenizer, media) as environment:
            yield EnvironmentTurns(config, tokenizer, environment, media)
    else:
        yield EnvironmentTurns(config, tokenizer)


class EnvironmentTurns:
    """Takes turns from an environment. Without one, a completion ends the sequence. See `Turns`."""

    can_wait = True

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerFast,
        environment: EnvironmentRunner | None = None,
        media: RolloutMedia | None = None,
    ) -> None:
        self._chat, self._environment, self._media = chat_of(tokenizer), environment, media
        self._stops = frozenset(generation_config(config).stop_token_ids)
        self._parses_calls = bool(config.environment.tools)  # whose marks may be special tokens
        self._room = bucket_widths(config.policy)[-1]
        self._calls: list[tuple[Sequence[Turn], Future[list[Reply]]]] = []  # calls of the environment

    @property
    def awaited(self) -> list[Future[Any]]:
        return [replies for _, replies in self._calls]

    def start(self, groups: Iterable[RolloutGroup]) -> list[Turn]:
        """Asks the environment for the prompts of all at once, unless tools are all it has."""
        turns = [(group, episode) for group in groups for episode in group.episodes]
        if self._environment is None or not self._environment.opens:
            return turns
        self._ask(turns)
        return []

    def take(self) -> list[Turn]:
        answered, self._calls = split_done(self._calls, lambda call: call[1])
        replied = [pair for turns, replies in answered for pair in zip(turns, replies.result(), strict=True)]
        for (group, episode), reply in replied:
            if not episode.finish_reason:  # not aborted since
                proceed = self._continue if episode.turns else self._begin
                proceed(group, episode, reply)
        return [turn for turn, _ in replied if not turn[1].finish_reason]

    def finish(self, ended: Sequence[tuple[Turn, FinishedRequest]]) -> None:
        questions = []
        for turn, result in ended:
            if self._environment is not None and result.finish_reason == "stop":
                questions.append(turn)
            else:
                self._end(*turn, result.finish_reason)
        self._ask(questions)

    def abort(self, group: RolloutGroup) -> None:
        for episode in group.episodes:
            if not episode.finish_reason:
                self._end(group, episode, ABORTED)

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        if self._environment is None:
            return {}
        return {**environment_failures(samples), **rendered_differently([sample.completion for sample in samples])}

    def _ask(self, turns: Sequence[Turn]) -> None:
        """Asks the environment about these sequences, in one call per environment process, which keeps their state."""
        parts: dict[int, list[Turn]] = {}
        for group, episode in turns:
            assert self._environment is not None
            worker = (group.number + group.place(episode)) % self._environment.workers
            parts.setdefault(worker, []).append((group, episode))
        for worker, part in parts.items():
            assert self._environment is not None
            self._calls.append((part, self._environment.submit(worker, [self._question(*turn) for turn in part])))

    def _begin(self, group: RolloutGroup, episode: Episode, reply: Reply) -> None:
        """Begins the first turn, after the prompt that the environment gave."""
        episode.prompt = reply.prompt or episode.prompt
        if reply.reason == FAILED:
            episode.failure, episode.finish_reason = reply.failure, FAILED
        elif len(episode) >= self._room:
            failure = f"reset gave a prompt of {len(episode)} tokens; the largest bucket has {self._room}"
            self._fail(group, episode, failure)

    def _continue(self, group: RolloutGroup, episode: Episode, reply: Reply) -> None:
        assert self._environment is not None
        episode.failure = reply.failure
        episode.turn_rewards.append(reply.reward)
        room, last = self._room - len(episode), episode.turns >= self._environment.max_turns
        media = None
        try:
            tokens = list[int]()
            if reply.content is not None and not last:
                tokens, media = self._tokens(episode, reply.content, room)
        except UserError as error:
            self._fail(group, episode, f"its reply: {error}")
            return
        except Exception as error:  # Jinja's errors, and those that templates raise
            self._fail(group, episode, f"the chat template rejects the reply {reply.content!r:.80}: {error}")
            return
        if not tokens:
            self._end(group, episode, reply.reason)
        elif len(tokens) >= room:
            self._end(group, episode, "length")
        else:
            episode.answer(tokens, media)

    def _fail(self, group: RolloutGroup, episode: Episode, failure: str) -> None:
        episode.failure = failure
        self._close(group, episode)
        episode.finish_reason = FAILED

    def _tokens(self, episode: Episode, reply: str | list[dict[str, Any]], room: int) -> tuple[list[int], IntArray | None]:
        """Returns the tokens of a reply to the last turn, and the images that they stand for. If they are more than there is
        `room` for, some are left out.
        """
        turn, prompt = episode.tokens[episode.turn_start :].tolist(), episode.prompt
        before = [*_conversation(episode, [""] * episode.turns), {"role": "assistant"}]
        episode.replies.append(reply)
        if isinstance(reply, str):
            return text_tokens(self._chat, turn, reply, room), None
        images = None if self._media is None else self._media.images(reply)
        return reply_row(self._chat, turn, self._stops, reply, prompt.tools, room, before, images, **prompt.variables)

    def _renders_again(self, episode: Episode) -> bool | None:
        """Returns whether the template writes the conversation up to the last turn with the tokens that it has."""
        if not episode.replies or any(isinstance(reply, str) for reply in episode.replies):
            return None
        texts, prompt = self._texts(episode), episode.prompt
        if len(episode.replies) != len(texts) - 1:
            return None
        tokens = [*prompt.tokens.tolist(), *episode.tokens[: episode.turn_start].tolist()]
        ids = None
        if self._media is not None:
            ids = partial(self._media.ids, media=episode.media_ids, encoder=self._chat.encoder)
        return self._chat.renders(_conversation(episode, texts), prompt.tools, tokens, ids, **prompt.variables)

    def _texts(self, episode: Episode, *, special: bool = False) -> list[str]:
        turns = [episode.tokens[start:end].tolist() for start, end in episode.spans() if episode.sampled[start]]
        return [self._chat.turn_text(turn, special=special) for turn in turns]

    def _end(self, group: RolloutGroup, episode: Episode, reason: str) -> None:
        episode.finish_reason = reason
        episode.renders_again = self._renders_again(episode)
        if reason != FAILED:
            self._close(group, episode)

    def _close(self, group: RolloutGroup, episode: Episode) -> None:
        if self._environment is not None:
            self._environment.close(_key(group, episode))

    def _question(self, group: RolloutGroup, episode: Episode) -> Question:
        texts = self._texts(episode, special=self._parses_calls)
        return Question(_key(group, episode), episode.prompt, episode.seed, texts, group.episodes[0].seed)


def _conversation(episode: Episode, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the conversation up to the last reply, with these texts of the policy's turns."""
    messages = prompt_messages(episode.prompt)
    for text, reply in zip(texts, episode.replies, strict=False):
        messages.append({"role": "assistant", "content": text})
        messages += [{"role": "user", "content": reply}] if isinstance(reply, str) else reply
    return messages


def _key(group: RolloutGroup, episode: Episode) -> str:
    """Identifies the episode for its environment."""
    return f"{group.number}/{group.place(episode)}"


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
        [_row_episode(episode.prompt, row) for row in part] for part in (conversations.rows, conversations.others)
    )
    episode.more = rows[1:]
    episode.untrained, episode.finish_reason = conversations.untrained, "stop"
    episode.reward_parts = {name or ENVIRONMENT: reward for name, reward in rewards.items()}
    for name in ("prompt", "finish_reason", *TOKEN_FIELDS) if rows else ():
        setattr(episode, name, getattr(rows[0], name))


def _row_media(media: Sequence[int]) -> RowMedia | None:
    return RowMedia((), np.array(media, np.int64)) if any(media) else None


def _row_episode(example: Prompt, row: Row) -> Episode:
    """Returns a conversation as an episode: its own prompt, and the other fields of the example."""
    tokens, media = np.array(row.prompt, np.int64), _row_media(row.shown)
    prompt = replace(example, text=row.text, tokens=tokens, messages=tuple(row.messages), media=media)
    columns: dict[str, Any] = {name: getattr(row, name) for name in TOKEN_FIELDS}
    return Episode(prompt, 0, 0, **columns, finish_reason=row.finish_reason)
