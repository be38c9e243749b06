"""Log-probabilities of a step's samples, under the policy and the reference; some while others are still generated.

    columns = logprobs_of(session, rows, known)   # of a whole batch: replays the rows that are not known yet

    with EarlyLogprobs(session) as early:         # with `grpo.overlap_logprobs`
        early.advance(groups)                     # after each quantum that training waits for, with the next batch's groups
        known = early.take()                      # once the batch is whole, before its step is taken

While training waits for the longest sequences, its weights stay as they are and its workers have nothing to do: sequences
that are finished are computed then, in one chunk at a time. `take` forgets what it gives, so that nothing computed before
an update of the weights is used after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from dagrl.config import Config
from dagrl.loops.episodes import Episode, RolloutGroup, token_rows
from dagrl.loops.session import Session
from dagrl.loops.sft import train_buckets
from dagrl.loops.stop import StopRequestedError
from dagrl.replay import Replay
from dagrl.shapes import Array, Batch, Bucket

Columns = Mapping[str, Array]
"""`logprobs`, `entropy` and `reference_logprobs`: [rows, tokens] float32 of a batch, or [tokens] of one of its rows."""

NAMES = ("logprobs", "entropy", "reference_logprobs")

Key = tuple[int, int]
"""A sample: its group's number, and its place in the group."""

Known = Mapping[Key, Columns]

CHUNKS = 8
"""A chunk has at least this part of a batch while more is to come: each has costs of its own, as swapping weights in."""


@dataclass(frozen=True)
class _Chunk:
    """Sequences whose log-probabilities are being computed, and the replays that do so, by phase."""

    keys: Sequence[Key]
    replays: Mapping[str, Replay]


class EarlyLogprobs:
    """See the module's first lines; idle without `grpo.overlap_logprobs`. For one thread at a time; a context manager."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[Key, Columns] = {}
        self._chunk: _Chunk | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # a checkpoint will be saved: workers must be at rest, with the whole of their state
        if (error is None or isinstance(error, StopRequestedError)) and self.take() and _offloads(self._session):
            self._session.replay("training_prep", self._session.step)

    def advance(self, groups: Sequence[RolloutGroup]) -> None:
        """Read the chunk that was started last, if it has ended, and start one with the sequences that finished since.

        `groups` are those that the next batch is certain to have. Never waits for a chunk, as generation would wait too.
        Raises the PhaseError of a chunk that failed.
        """
        config = self._session.config
        if not config.grpo.overlap_logprobs:
            return
        if self._chunk is not None and all(replay.ready() for replay in self._chunk.replays.values()):
            self._read(self._chunk)
        if self._chunk is None:
            made = {(group.number, place): episode for group in groups for place, episode in enumerate(group.episodes)}
            finished = {key: episode for key, episode in made.items() if episode.finish_reason}
            new = {key: episode for key, episode in finished.items() if key not in self._known}
            samples = _samples(config)
            if new and (len(new) >= samples // CHUNKS or len(finished) == samples):
                self._start(new)

    def take(self) -> Known:
        """All that has been computed since the last call, waiting for what is under way; it is forgotten here."""
        if self._chunk is not None:
            self._read(self._chunk)
        known, self._known = self._known, {}
        return known

    def _start(self, episodes: Mapping[Key, Episode]) -> None:
        session = self._session
        if _offloads(session) and not self._known:
            session.replay("logprob_inference_prep", session.step)
        rows = token_rows(list(episodes.values()))
        self._chunk = _Chunk(list(episodes), {name: session.submit(name, rows) for name in _phases(session.config)})

    def _read(self, chunk: _Chunk) -> None:
        self._chunk = None
        self._session.attend("train")  # that its results waited for the driver is no overhead of it
        columns = _columns({name: self._session.collect(name, replay)[0] for name, replay in chunk.replays.items()})
        for row, key in enumerate(chunk.keys):
            self._known[key] = {name: columns[name][row] for name in NAMES}


def logprobs_of(session: Session, rows: Batch, known: Sequence[Columns | None]) -> Columns:
    """The columns of `rows` (`tokens`, `lengths`); those of rows that are `known` (None: not) are not computed again.

    With `policy.offload_optimizer_for_logprob` the optimizer's state is away until they are there; it left with the first
    of a step, whether that is here or was early.
    """
    missing = [row for row, found in enumerate(known) if found is None]
    if _offloads(session) and len(missing) == rows.rows:
        session.replay("logprob_inference_prep", session.step)
    columns = {name: np.zeros(rows["tokens"].shape, np.float32) for name in NAMES}
    for row, found in enumerate(known):
        for name, values in (found or {}).items():
            width = min(len(values), rows.tokens)  # a chunk may be wider than the batch: padding
            columns[name][row, :width] = values[:width]
    if missing:
        batch = rows.select(missing)
        for name, values in _columns({name: session.replay(name, batch) for name in _phases(session.config)}).items():
            columns[name][missing, : values.shape[1]] = values  # the longest of the missing may be shorter
    if _offloads(session):
        session.replay("training_prep", session.step)
    return columns


def logprob_buckets(config: Config) -> tuple[Bucket, ...]:
    """Buckets of a whole batch; where parts of it come early, of its `CHUNKS`th part, twice that and so on too."""
    samples = _samples(config)
    rows = max(1, samples // CHUNKS) if config.grpo.overlap_logprobs else samples
    buckets: tuple[Bucket, ...] = ()
    while rows < samples:
        buckets += train_buckets(config, rows)
        rows *= 2
    return tuple(dict.fromkeys((*buckets, *train_buckets(config, samples))))


def _samples(config: Config) -> int:
    """Of a batch."""
    return config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt


def _phases(config: Config) -> tuple[str, ...]:
    return ("logprobs", "reference_logprobs") if config.loss_fn.reference_policy_kl_penalty else ("logprobs",)


def _columns(found: Mapping[str, Batch]) -> Columns:
    """Columns from the result of each phase; without a KL penalty the reference's log-probabilities are 0."""
    policy, reference = found["logprobs"], found.get("reference_logprobs")
    values = np.zeros_like(policy["logprobs"]) if reference is None else reference["logprobs"]
    return {"logprobs": policy["logprobs"], "entropy": policy["entropy"], "reference_logprobs": values}


def _offloads(session: Session) -> bool:
    return session.config.policy.offload_optimizer_for_logprob
