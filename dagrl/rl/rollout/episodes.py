"""Episodes: the sequences that generation makes, in groups of one prompt, with their seeds and token rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from dagrl.config import Config, ForcedLengths
from dagrl.config.settings import generation_config
from dagrl.data.chat import chat_of
from dagrl.data.media import MEDIA, ids_in
from dagrl.data.tokenization import Prompt
from dagrl.rl.generation import AS_CONFIGURED, FinishedRequest, FloatArray, IntArray, RequestOptions
from dagrl.rl.routed_experts import Record, join_records
from dagrl.runtime.shapes import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKEN_FIELDS = {"tokens": np.int64, "logprobs": np.float32, "versions": np.int64, "sampled": np.bool_, "media": np.int64}
"""The arrays of an episode [tokens], and their types."""

_NO_TOKENS: dict[str, npt.NDArray[Any]] = {name: np.zeros(0, dtype) for name, dtype in TOKEN_FIELDS.items()}
"""The arrays of all episodes that have no tokens yet."""

_SAMPLED, _NO_MEDIA = np.ones(1 << 15, np.bool_), np.zeros(1 << 15, np.int64)
"""Requests that are not longer share them: 512 arrays of their own take a millisecond of a step."""


@dataclass(eq=False)
class Episode:
    """A sequence that is being generated: the tokens that follow its prompt. Its arrays are replaced, never written to.

    `sampled` is False on tokens of an environment; they have log-probability 0 and the version of their turn. `media` has
    the ids of its images at the tokens that stand for them (`dagrl.data.media`), as the prompt's own has. `failure` is the
    environment's error if the finish reason is `environment_failed`. `turn_rewards` has one for each turn that it answered,
    None for a turn without. A `greedy` sequence takes the likeliest token at each step; `options` are further ones of its
    request. `experts` is the record of prompt and tokens, which may be shorter than they are.

    An agent may have several conversations: `more` are those after the first, each with a prompt of its own, `others` those
    that are not trained on, and `untrained` counts sampled tokens that are in the loss of none. `reward_parts` are the
    rewards that it named.

    `replies` are the texts or messages of the environment, and `renders_again` says whether the template's text of the
    finished conversation has these tokens (None: not known).
    """

    prompt: Prompt
    seed: int
    max_new_tokens: int
    tokens: IntArray = field(default_factory=lambda: _NO_TOKENS["tokens"])
    logprobs: FloatArray = field(default_factory=lambda: _NO_TOKENS["logprobs"])
    versions: IntArray = field(default_factory=lambda: _NO_TOKENS["versions"])
    sampled: npt.NDArray[np.bool_] = field(default_factory=lambda: _NO_TOKENS["sampled"])
    finish_reason: str = ""
    turns: int = 0
    turn_start: int = 0
    failure: str = ""
    greedy: bool = False
    turn_rewards: list[float | None] = field(default_factory=list)
    experts: Record | None = None
    options: RequestOptions = AS_CONFIGURED
    more: list[Episode] = field(default_factory=list)
    others: list[Episode] = field(default_factory=list)
    untrained: int = 0
    reward_parts: dict[str, float] = field(default_factory=dict)
    replies: list[str | list[dict[str, Any]]] = field(default_factory=list)
    renders_again: bool | None = None
    media: IntArray = field(default_factory=lambda: _NO_TOKENS["media"])

    def __post_init__(self) -> None:
        for name, dtype in TOKEN_FIELDS.items():
            setattr(self, name, np.asarray(getattr(self, name), dtype))
        if not len(self.media):
            self.media = np.zeros(len(self.tokens), np.int64)

    def __len__(self) -> int:
        return len(self.prompt.tokens) + len(self.tokens)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for its turn any more."""
        return False

    @property
    def media_ids(self) -> list[int]:
        """The ids of all images, of the prompt first."""
        return [*(ids_in(self.prompt.media.tokens) if self.prompt.media is not None else ()), *ids_in(self.media)]

    def spans(self) -> list[tuple[int, int]]:
        """Returns where each turn of the policy or the environment starts and ends in `tokens`, in order."""
        if not len(self.tokens):
            return []
        changes = (np.flatnonzero(np.diff(self.sampled)) + 1).tolist()
        return list(zip([0, *changes], [*changes, len(self.tokens)], strict=True))

    def append(self, result: FinishedRequest) -> None:
        """Appends the tokens of a finished request."""
        count = len(result.tokens)
        sampled, media = _SAMPLED[:count], _NO_MEDIA[:count]
        if len(sampled) < count:
            sampled, media = np.ones(count, np.bool_), np.zeros(count, np.int64)
        self._extend(result.tokens, result.logprobs, result.versions, sampled, media)
        self.experts = join_records(self.experts, result.experts)

    def answer(self, tokens: Sequence[int], media: IntArray | None = None) -> None:
        """Appends the tokens of the environment, with their `media` if it has shown some, and begins a new turn."""
        nothing, version = np.zeros(len(tokens)), self.versions[-1] if len(self.versions) else 0
        self._extend(tokens, nothing, np.full(len(tokens), version), nothing, nothing if media is None else media)
        self.turn_start = len(self.tokens)

    def _extend(self, *added: npt.ArrayLike) -> None:
        """Appends to each of the `TOKEN_FIELDS`."""
        for (name, dtype), column in zip(TOKEN_FIELDS.items(), added, strict=True):
            more: npt.NDArray[Any] = np.asarray(column, dtype)
            setattr(self, name, np.concatenate([getattr(self, name), more]) if len(getattr(self, name)) else more)


@dataclass(frozen=True)
class Sample:
    """A finished sequence: its prompt, its completion, and the completion's text."""

    prompt: Prompt
    completion: Episode
    text: str

    def __len__(self) -> int:
        return len(self.completion)

    @property
    def rows(self) -> list[Episode]:
        """The sequences that are trained on: the completion, and an agent's other conversations."""
        return [self.completion, *self.completion.more]


@dataclass
class RolloutGroup:
    """The sequences of one prompt. `number` identifies the group; `key` is the number of its prompt."""

    number: int
    key: int
    episodes: list[Episode]
    cohort: int = 0

    @property
    def complete(self) -> bool:
        return all(episode.finish_reason for episode in self.episodes)

    def place(self, episode: Episode) -> int:
        """Returns the place of one of its episodes."""
        return next(place for place, item in enumerate(self.episodes) if item is episode)


Turn = tuple[RolloutGroup, Episode]  # a sequence whose turn is generated next, runs or has ended
ABORTED = "aborted"  # the finish reason of sequences that were dropped


def new_group(config: Config, number: int, key: int, prompt: Prompt, seeds: Sequence[int], cohort: int = 0) -> RolloutGroup:
    """Returns a group with one sequence per seed."""
    generation = generation_config(config)
    limits = [generation.max_new_tokens] * len(seeds)
    if generation.forced_lengths is not None:
        limits = forced_lengths(generation.forced_lengths, config.seed, key, seeds, generation.max_new_tokens)
    episodes = [Episode(prompt, seed, limit) for seed, limit in zip(seeds, limits, strict=True)]
    return RolloutGroup(number, key, episodes, cohort)


def samples_of(tokenizer: PreTrainedTokenizerFast, *groups: RolloutGroup) -> list[Sample]:
    """Returns the sequences of complete groups with their texts, group by group."""
    episodes = [episode for group in groups for episode in group.episodes]
    chat = chat_of(tokenizer)
    ended = [len(episode.tokens) > 0 and episode.tokens[-1] in chat.ends for episode in episodes]
    texts = chat.decoder([episode.tokens[: -1 if end else None] for episode, end in zip(episodes, ended, strict=True)])
    return [Sample(episode.prompt, episode, chat.without_end(text)) for episode, text in zip(episodes, texts, strict=True)]


def request_seeds(seed: int, stream: int, count: int) -> list[int]:
    """Returns `count` seeds for the requests of a group. They depend only on the run's seed and the group's number."""
    drawn: npt.NDArray[np.int64] = np.random.default_rng((seed, stream)).integers(0, 2**31 - 1, count, dtype=np.int64)
    return cast("list[int]", drawn.tolist())


def turn_seed(episode: Episode) -> int:
    """Returns the seed of the request that continues the episode. Each request restarts the random stream of its seed."""
    count = len(episode.tokens)
    return request_seeds(episode.seed, count, 1)[0] if count else episode.seed


def forced_lengths(config: ForcedLengths, seed: int, key: int, seeds: Sequence[int], longest: int) -> list[int]:
    """Returns forced lengths [seeds] for the requests of prompt `key`: log-normal, clipped to 1 to `longest`."""
    if not config.sigma:
        return [min(max(round(config.median), 1), longest)] * len(seeds)
    shared = np.random.default_rng((seed, abs(key), 2)).normal()
    own = np.array([np.random.default_rng((request, 1)).normal() for request in seeds])
    spread = (shared + own) / math.sqrt(2)  # half of the variance is between prompts
    lengths: list[int] = np.clip(np.rint(config.median * np.exp(config.sigma * spread)), 1, longest).astype(int).tolist()
    return lengths


def token_rows(episodes: Sequence[Episode], *, media: bool = False, widths: Sequence[int] = ()) -> Batch:
    """Returns sequences as rows: `tokens` [sequences, width], prompt and completion so far, and `lengths`.

    The width is the first of the ascending `widths` that holds the longest, or its length. With `media`, also that field
    (`dagrl.data.media`).
    """
    lengths = [len(episode) for episode in episodes]
    longest = max(lengths, default=1)
    tokens = np.zeros((len(episodes), next((width for width in widths if width >= longest), longest)), np.int64)
    ids = np.zeros(tokens.shape if media else (len(episodes), 0), np.int64)
    for row, shown, episode, end in zip(tokens, ids, episodes, lengths, strict=True):  # a mask would take four times as long
        start = len(episode.prompt.tokens)
        row[:start], row[start:end] = episode.prompt.tokens, episode.tokens
        if media:
            shown[start:end] = episode.media
            if episode.prompt.media is not None:
                shown[:start] = episode.prompt.media.tokens
    return Batch({"tokens": tokens, "lengths": np.array(lengths, np.int64), **({MEDIA: ids} if media else {})})
