"""Episodes: the sequences that generation makes, in groups of one prompt; their seeds, and rows of their tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt

from dagrl.config import ForcedLengths
from dagrl.config.settings import generation_config
from dagrl.data.tokenization import Prompt
from dagrl.generation import FinishedRequest
from dagrl.loops.session import Session
from dagrl.shapes import Batch


@dataclass
class Episode:
    """One sequence that is being made: what follows its prompt, token by token.

    `sampled` is False on tokens that an environment wrote; those have the log-probability 0 and the version of their turn.
    `awaiting`: the last turn has ended, and the environment has not answered it yet. `failure` is what the environment
    raised, where the finish reason is `environment_failed`.
    """

    prompt: Prompt
    seed: int
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    finish_reason: str = ""
    turns: int = 0
    turn_start: int = 0
    awaiting: bool = False
    failure: str = ""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def turn_left(self) -> int:
        """New tokens that this turn may still have."""
        return self.max_new_tokens - (len(self.tokens) - self.turn_start)

    def append(self, made: FinishedRequest) -> None:
        """Take up what a request made."""
        self.tokens += made.tokens
        self.logprobs += made.logprobs
        self.versions += made.versions
        self.sampled += [True] * len(made.tokens)

    def take_back(self, count: int) -> None:
        """Forget the last `count` tokens, which are made again."""
        for column in (self.tokens, self.logprobs, self.versions, self.sampled):
            del column[len(column) - count :]

    def answer(self, tokens: Sequence[int]) -> None:
        """Take up what the environment wrote; a new turn begins."""
        version = self.versions[-1] if self.versions else 0
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [version] * len(tokens)
        self.sampled += [False] * len(tokens)
        self.turn_start = len(self.tokens)


@dataclass(frozen=True)
class Sample:
    """A finished sequence: its prompt, what followed, and the text of that."""

    prompt: Prompt
    completion: Episode
    text: str

    def __len__(self) -> int:
        return len(self.completion)


@dataclass
class RolloutGroup:
    """The sequences of one prompt. `number` tells groups apart; `key` names the prompt in the history of lengths."""

    number: int
    key: int
    episodes: list[Episode]
    cohort: int = 0

    @property
    def complete(self) -> bool:
        return all(episode.finish_reason for episode in self.episodes)


def new_group(
    session: Session, number: int, key: int, prompt: Prompt, seeds: Sequence[int], cohort: int = 0
) -> RolloutGroup:
    """A group with one sequence for each seed."""
    generation = generation_config(session.config)
    limits = [generation.max_new_tokens] * len(seeds)
    if generation.forced_lengths is not None:
        limits = forced_lengths(generation.forced_lengths, session.config.seed, key, seeds, generation.max_new_tokens)
    episodes = [Episode(prompt, seed, limit) for seed, limit in zip(seeds, limits, strict=True)]
    return RolloutGroup(number, key, episodes, cohort)


def samples_of(session: Session, group: RolloutGroup) -> list[Sample]:
    """A complete group's sequences with their texts."""
    texts = session.inputs.tokenizer.batch_decode([episode.tokens for episode in group.episodes], skip_special_tokens=True)
    return [Sample(episode.prompt, episode, text) for episode, text in zip(group.episodes, texts, strict=True)]


def half_stop(tokens: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int:
    """How many tokens at the end may begin one of the strings `stops`: their text ends with the beginning of one."""
    text = decode(tokens)
    beginnings = (stop[:length] for stop in stops for length in range(1, len(stop)))
    begun = max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
    count = 0
    while begun and count < len(tokens) and len(decode(tokens[: len(tokens) - count])) > len(text) - begun:
        count += 1
    return count


def request_seeds(seed: int, stream: int, count: int) -> list[int]:
    """Seeds [count] of a group's requests: they depend on the run's seed and the group's number alone."""
    drawn: npt.NDArray[np.int64] = np.random.default_rng((seed, stream)).integers(0, 2**31 - 1, count, dtype=np.int64)
    return cast("list[int]", drawn.tolist())


def turn_seed(episode: Episode) -> int:
    """The seed of the request that goes on from here: engines draw from the start of a seed's numbers for each request."""
    return request_seeds(episode.seed, len(episode.tokens), 1)[0] if episode.tokens else episode.seed


def forced_lengths(config: ForcedLengths, seed: int, key: int, seeds: Sequence[int], longest: int) -> list[int]:
    """Lengths [seeds] that the requests of prompt `key` are given: log-normal, 1 to `longest`."""
    shared = np.random.default_rng((seed, abs(key), 2)).normal()
    own = np.array([np.random.default_rng((request, 1)).normal() for request in seeds])
    spread = math.sqrt(config.between_prompts) * shared + math.sqrt(1 - config.between_prompts) * own
    lengths: list[int] = np.clip(np.rint(config.median * np.exp(config.sigma * spread)), 1, longest).astype(int).tolist()
    return lengths


def token_rows(episodes: Sequence[Episode]) -> Batch:
    """Sequences as rows: `tokens` [sequences, longest], prompt and what follows it so far, and `lengths`."""
    tokens = np.zeros((len(episodes), max(map(len, episodes), default=1)), np.int64)
    for row, episode in enumerate(episodes):
        start, end = len(episode.prompt), len(episode)
        tokens[row, :start] = episode.prompt.tokens
        tokens[row, start:end] = episode.tokens
    return Batch({"tokens": tokens, "lengths": np.array([len(episode) for episode in episodes], np.int64)})
