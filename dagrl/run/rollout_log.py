"""Writes what each step trained on, validated or dropped into `rollouts/`, in a thread."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

from dagrl.rl.rollout.record import LogprobColumns, TokenTexts, rollout_rows, untrained_rows
from dagrl.rl.rollout.scoring import ScoredGroup, Untrained
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.shapes import Array, Batch
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.rollouts import OTHER, RolloutFiles, load_writer, table_of

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

METHOD = "kept_logprobs"

WAITING = 2  # files that may wait to be written when another one comes: those of one step
Prepared: TypeAlias = "pyarrow.Table"  # the table of a step's samples


class RolloutLog:
    """Reads the train workers' log-probabilities and writes the files, both in a thread. A context manager."""

    def __init__(
        self, files: RolloutFiles, train: WorkerGroup, tokenizer: PreTrainedTokenizerFast, deadline: Deadline
    ) -> None:
        self._files, self._train, self._deadline = files, train, deadline
        self._texts = TokenTexts(tokenizer)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._writing: deque[Future[None]] = deque([self._pool.submit(load_writer)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown()
        try:
            self.flush()
        except OSError as lost:
            if error is None:
                raise
            logger.warning("samples of the last steps are not in rollouts/: %s", lost)

    def flush(self) -> None:
        """Waits until all files are written. Raises the OSError of one that could not be."""
        self._check(0)

    def keep(self, groups: Sequence[ScoredGroup], batch: Batch, step: int) -> KeptSamples:
        """Prepares the samples of `step` for `rollouts/` in a thread, with log-probabilities from the train workers.

        Call `KeptSamples.write` once the step has succeeded, before the next one begins.

        Raises the OSError of an earlier file.
        """
        self._check()
        columns = self._pool.submit(kept_columns, self._train, self._deadline)
        prepared = self._pool.submit(lambda: table_of(rollout_rows(groups, batch, columns.result(), step, self._texts)))
        return KeptSamples(self, step, columns, prepared)

    def write(self, prepared: Future[Prepared], step: int) -> None:
        """Writes a step's samples in the thread."""
        self._writing.append(self._pool.submit(lambda: self._files.write(step, prepared.result())))

    def keep_untrained(self, untrained: Sequence[Untrained], step: int) -> None:
        """Keeps samples that no step trains on. Raises the OSError of an earlier file."""
        if untrained:
            self._check()
            self._writing.append(self._pool.submit(self._write_untrained, untrained, step))

    def _write_untrained(self, untrained: Sequence[Untrained], step: int) -> None:
        self._files.write(step, table_of(untrained_rows(untrained, step, self._texts)), OTHER)

    def _check(self, most: int = WAITING) -> None:
        """Raises the error of a file that was not written; waits while more than `most` files are not written yet."""
        while self._writing and (len(self._writing) > most or self._writing[0].done()):
            self._writing.popleft().result()


@dataclass(frozen=True)
class KeptSamples:
    """Samples of a step, whose log-probabilities (`columns`) the train workers hold until the next step."""

    log: RolloutLog
    step: int
    columns: Future[LogprobColumns]
    prepared: Future[Prepared]

    def write(self) -> None:
        """Writes them, once their log-probabilities have come."""
        self.columns.result()
        self.log.write(self.prepared, self.step)


def kept_columns(train: WorkerGroup, deadline: Deadline) -> LogprobColumns:
    """Returns what all train workers keep for the current step; nothing from a worker class without the method."""
    if METHOD not in train.role.methods:
        return {}
    joined: dict[str, dict[int, Array]] = defaultdict(dict)
    answers: Sequence[Mapping[str, Mapping[int, Array]]] = train.call(METHOD, deadline=deadline)
    for columns in answers:
        for name, rows in columns.items():
            joined[name].update(rows)
    return joined
