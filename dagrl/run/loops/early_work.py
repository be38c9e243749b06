"""Work on the next training batch while the loop still waits for the rest of it: log-probabilities, and gradients.

    with EarlyWork(config, replays) as early:              # with `grpo.overlap_logprobs`, `grpo.overlap_training`
        early.advance(experience.next_batch(), step)       # after each quantum that training waits for
        done = early.take()                                # once the batch is complete, before its step

While training waits for the longest sequences, its weights do not change and its workers are idle. Finished sequences then
get their log-probabilities, and scored groups their gradients, one chunk of each at a time. `take` forgets what it returns,
so nothing computed before a weight update is used after it. Without the options, the log-probabilities of a whole batch are
computed while it waits for its scores, in the replay and on the shards that would compute them later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from dagrl.config import Config
from dagrl.config.settings import rows_per_sample, samples_per_step, uses_teacher
from dagrl.errors import StopRequestedError, WorkerError
from dagrl.rl.rollout.batches import Key, row_ids, sample_keys, scored_batch, with_experts
from dagrl.rl.rollout.episodes import Episode, token_rows
from dagrl.rl.rollout.experience import NextBatch
from dagrl.rl.rollout.scoring import ScoredGroup
from dagrl.run.loops.logprobs import (
    ShardRows,
    begin_logprobs,
    collect_logprobs,
    end_logprobs,
    logprob_batch,
    split_minibatches,
    submit_logprobs,
    whole_rows,
)
from dagrl.run.plans import least_chunk, logprob_phases
from dagrl.run.replays import Replays
from dagrl.runtime.replay import Replay
from dagrl.runtime.shapes import Batch


@dataclass
class Early:
    """Work done before a batch was complete: samples whose log-probabilities are known to the workers, and groups whose
    gradients are accumulated in `parts` replays."""

    known: set[Key] = field(default_factory=set)
    accumulated: set[int] = field(default_factory=set)
    parts: int = 0


@dataclass(frozen=True)
class _Chunk:
    """Samples whose log-probabilities are being computed, and the replays that do so, by phase (possibly none).

    `shards` has the rows of each shard, if they matter.
    """

    keys: Sequence[Key]
    batch: Batch
    shards: ShardRows | None
    replays: Mapping[str, Replay]


class EarlyWork:
    """See the module's docstring. For one thread at a time; a context manager."""

    def __init__(self, config: Config, replays: Replays) -> None:
        self._config, self._replays = config, replays
        self._step = 0
        self._done = Early()
        self._chunk: _Chunk | None = None
        self._part: Replay | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # a checkpoint will be saved: workers must be idle, with their whole state on the device
        if (error is None or isinstance(error, StopRequestedError)) and self.take().known:
            end_logprobs(self._config, self._replays, self._step)

    @property
    def wanted(self) -> bool:
        """Whether one of its options is on."""
        return self._config.grpo.overlap_logprobs or self._config.grpo.overlap_training

    def advance(self, batch: NextBatch, step: int) -> None:
        """Reads finished chunks, and starts others with what is new in `batch`. `step` trains on the batch.

        Never waits for a chunk, because generation would wait too. Raises the PhaseError of a failed chunk, and begins again
        when it is called after that.
        """
        self._step = step
        options = self._config.grpo
        with self._forgetting():
            if options.overlap_logprobs:
                self._advance_logprobs(_finished(batch))
            elif self._chunk is None and self._computes_ahead():
                finished = _finished(batch)
                if len(finished) == samples_per_step(self._config):
                    self._start_chunk(dict(sorted(finished.items())))  # in the order of the batch
            if options.overlap_training:
                self._advance_gradients(batch.scored)

    def take(self) -> Early:
        """Waits for chunks in flight, returns all work done since the last call, and forgets it."""
        with self._forgetting():
            if self._chunk is not None:
                self._read_chunk(self._chunk)
            if self._part is not None:
                self._read_part(self._part)
        done, self._done = self._done, Early()
        return done

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """Forgets all work if workers fail in the block: it is lost with one of them."""
        try:
            yield
        except WorkerError:
            self._chunk = self._part = None
            self._done = Early()
            raise

    def _advance_logprobs(self, finished: Mapping[Key, Episode]) -> None:
        if self._chunk is not None and all(replay.ready() for replay in self._chunk.replays.values()):
            self._read_chunk(self._chunk)
        if self._chunk is None:
            new = {key: episode for key, episode in finished.items() if key not in self._done.known}
            if new and (len(new) >= least_chunk(self._config) or len(finished) == samples_per_step(self._config)):
                self._start_chunk(new)

    def _computes_ahead(self) -> bool:
        """Whether a whole batch gets log-probabilities before its scores: it needs some, and train workers are free."""
        needed = bool(logprob_phases(self._config)) or uses_teacher(self._config)
        return needed and rows_per_sample(self._config) == 1 and self._replays.shared is None

    def _start_chunk(self, episodes: Mapping[Key, Episode]) -> None:
        if not self._done.known:
            begin_logprobs(self._config, self._replays, self._step)
        keys = list(episodes)
        rows = token_rows(list(episodes.values())).with_fields(row_ids=row_ids(self._config, keys))
        batch = logprob_batch(with_experts(self._config, rows, list(episodes.values())), self._step)
        shards = whole_rows(self._config, split_minibatches(self._config, batch))
        self._chunk = _Chunk(keys, batch, shards, submit_logprobs(self._config, self._replays, batch, shards))

    def _read_chunk(self, chunk: _Chunk) -> None:
        self._chunk = None
        self._replays.exclude_wait("train")  # the results may have waited for the driver
        collect_logprobs(self._replays, chunk.batch, chunk.replays, chunk.shards)
        self._done.known.update(chunk.keys)

    def _advance_gradients(self, scored: Sequence[ScoredGroup]) -> None:
        """Always leaves some of the batch for its `train_step`."""
        config, done = self._config, self._done
        if self._part is not None and self._part.ready():
            self._read_part(self._part)
        if self._part is None:
            new = [group for group in scored if group.group.number not in done.accumulated]
            new = [group for group in new if done.known.issuperset(sample_keys([group]))]
            complete = len(done.accumulated) + len(new) == config.grpo.num_prompts_per_step
            if len(sample_keys(new)) >= least_chunk(config) and not complete:
                self._start_part(new)

    def _start_part(self, groups: Sequence[ScoredGroup]) -> None:
        done = self._done
        batch = scored_batch(self._config, groups, self._step).with_scalars(step=self._step, parts=float(done.parts))
        self._part = self._replays.submit("accumulate_gradients", batch)
        done.accumulated |= {group.group.number for group in groups}
        done.parts += 1

    def _read_part(self, part: Replay) -> None:
        self._part = None
        self._replays.exclude_wait("train")
        self._replays.collect("accumulate_gradients", part)


def _finished(batch: NextBatch) -> dict[Key, Episode]:
    """The finished sequences with tokens, by sample."""
    return {key: one for key, one in batch.episodes().items() if one.finish_reason and len(one.tokens)}
