"""What training does for the next batch while it waits for the rest of it: log-probabilities, and gradients.

    with EarlyWork(session) as early:             # with `grpo.overlap_logprobs`, `grpo.overlap_training`
        early.advance(experience.next_batch())    # after each quantum that training waits for
        done = early.take()                       # once the batch is whole, before its step is taken

While training waits for the longest sequences, its weights stay as they are and its workers have nothing to do. Sequences
that are finished then get their log-probabilities, and whole groups that are scored their gradients, in one chunk of each
at a time. `take` forgets what it gives, so that nothing computed before an update of the weights is used after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from dagrl.config.settings import samples_per_step
from dagrl.loops.batches import sample_keys, scored_batch, with_columns
from dagrl.loops.episodes import Episode, token_rows
from dagrl.loops.experience import NextBatch
from dagrl.loops.logprobs import (
    NAMES,
    Columns,
    Key,
    begin_logprobs,
    columns_of,
    end_logprobs,
    least_chunk,
    read_logprobs,
    submit_logprobs,
)
from dagrl.loops.scoring import ScoredGroup
from dagrl.loops.session import Session
from dagrl.loops.stop import StopRequestedError
from dagrl.replay import Replay
from dagrl.shapes import Batch


@dataclass
class Early:
    """Done for a batch before it was whole: columns of samples, and groups whose gradients are accumulated, in `parts`."""

    known: dict[Key, Columns] = field(default_factory=dict)
    learned: set[int] = field(default_factory=set)
    parts: int = 0


@dataclass(frozen=True)
class _Chunk:
    """Sequences whose log-probabilities are being computed, and the replays that do so, by phase; perhaps none."""

    keys: Sequence[Key]
    rows: Batch
    replays: Mapping[str, Replay]


class EarlyWork:
    """See the module's first lines; idle without its options. For one thread at a time; a context manager."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._done = Early()
        self._chunk: _Chunk | None = None
        self._part: Replay | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # a checkpoint will be saved: workers must be at rest, with the whole of their state
        if (error is None or isinstance(error, StopRequestedError)) and self.take().known:
            end_logprobs(self._session)

    def advance(self, batch: NextBatch) -> None:
        """Read the chunks that have ended, and start others with what `batch` has more since.

        Never waits for a chunk, as generation would wait too. Raises the PhaseError of a chunk that failed.
        """
        options = self._session.config.grpo
        if options.overlap_logprobs:
            self._advance_logprobs({key: episode for key, episode in batch.episodes().items() if episode.finish_reason})
        if options.overlap_training:
            self._advance_gradients(batch.scored)

    def take(self) -> Early:
        """All that has been done since the last call, waiting for what is under way; it is forgotten here."""
        if self._chunk is not None:
            self._read_chunk(self._chunk)
        if self._part is not None:
            self._read_part(self._part)
        done, self._done = self._done, Early()
        return done

    def _advance_logprobs(self, finished: Mapping[Key, Episode]) -> None:
        config = self._session.config
        if self._chunk is not None and all(replay.ready() for replay in self._chunk.replays.values()):
            self._read_chunk(self._chunk)
        if self._chunk is None:
            new = {key: episode for key, episode in finished.items() if key not in self._done.known}
            if new and (len(new) >= least_chunk(config) or len(finished) == samples_per_step(config)):
                self._start_chunk(new)

    def _start_chunk(self, episodes: Mapping[Key, Episode]) -> None:
        if not self._done.known:
            begin_logprobs(self._session)
        rows = token_rows(list(episodes.values()))
        self._chunk = _Chunk(list(episodes), rows, submit_logprobs(self._session, rows))

    def _read_chunk(self, chunk: _Chunk) -> None:
        self._chunk = None
        self._session.attend("train")  # that its results waited for the driver is no overhead of it
        columns = read_logprobs(self._session, chunk.rows, chunk.replays)
        for row, key in enumerate(chunk.keys):
            self._done.known[key] = {name: columns[name][row] for name in NAMES}

    def _advance_gradients(self, scored: Sequence[ScoredGroup]) -> None:
        """Some of the batch is always left for its `train_step`."""
        config, done = self._session.config, self._done
        if self._part is not None and self._part.ready():
            self._read_part(self._part)
        if self._part is None:
            new = [group for group in scored if group.group.number not in done.learned]
            new = [group for group in new if done.known.keys() >= set(sample_keys([group]))]
            whole = len(done.learned) + len(new) == config.grpo.num_prompts_per_step
            if len(sample_keys(new)) >= least_chunk(config) and not whole:
                self._start_part(new)

    def _start_part(self, groups: Sequence[ScoredGroup]) -> None:
        session, done = self._session, self._done
        batch = scored_batch(session.config, groups, session.step + 1)
        columns = columns_of([done.known[key] for key in sample_keys(groups)], batch)
        rows = with_columns(batch, columns).with_scalars(parts=float(done.parts))
        self._part = session.submit("accumulate_gradients", rows)
        done.learned |= {group.group.number for group in groups}
        done.parts += 1

    def _read_part(self, part: Replay) -> None:
        self._part = None
        self._session.attend("train")
        self._session.collect("accumulate_gradients", part)
