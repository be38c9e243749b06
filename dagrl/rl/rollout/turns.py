"""Sources of turns: an environment or none (here), or agents (`agent_turns`).

with open_turns(config, tokenizer) as turns:
    ready = turns.start(groups)     # begins sequences; returns those whose turn can be generated
    turns.finish(ended)             # turns that were generated
    ready = turns.take()            # the next ones
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from dagrl.config import Config
from dagrl.config.settings import bucket_widths, generation_config
from dagrl.data.chat import chat_of
from dagrl.data.media import MediaProcessor
from dagrl.data.replies import reply_row, text_tokens
from dagrl.errors import UserError
from dagrl.rl.agents.runner import AgentRunner
from dagrl.rl.environments import FAILED, EnvironmentRunner, Question, Reply, prompt_messages
from dagrl.rl.functions.answers import split_done
from dagrl.rl.generation import FinishedRequest, IntArray
from dagrl.rl.media import RolloutMedia
from dagrl.rl.rollout.agent_turns import AgentTurns
from dagrl.rl.rollout.episodes import ABORTED, Episode, RolloutGroup, Sample, Turn
from dagrl.rl.rollout.scoring import environment_failures, rendered_differently

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
        episode.failure = reply.failure
        episode.prompt = reply.prompt or episode.prompt
        if reply.reason != FAILED and len(episode) >= self._room:
            episode.failure = f"reset gave a prompt of {len(episode)} tokens; the largest bucket has {self._room}"
            self._close(group, episode)
        if episode.failure:
            episode.finish_reason = FAILED

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
