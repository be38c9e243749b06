"""Keeps what each step trained on, validated or dropped in `rollouts/`, and shows a part in the trace, during the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dagrl.rl.rollout.record import Kept, TokenTexts, rollout_rows, untrained_rows
from dagrl.rl.rollout.scoring import ScoredGroup, Untrained
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.shapes import Array, Batch
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.conversations import ConversationTrace
from dagrl.telemetry.rollouts import OTHER, RolloutFiles, load_writer
from dagrl.telemetry.trace import TraceWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

METHOD = "kept_logprobs"


class RolloutLog:
    """Reads the train workers' log-probabilities and writes the files, both in a thread. A context manager."""

    def __init__(
        self,
        files: RolloutFiles,
        train: WorkerGroup,
        tokenizer: PreTrainedTokenizerFast,
        deadline: Deadline,
        trace: TraceWriter | None = None,
    ) -> None:
        self._files, self._train, self._deadline = files, train, deadline
        self._trace, self._conversations = trace, ConversationTrace()
        self._texts = TokenTexts(tokenizer)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._writing: Future[None] = self._pool.submit(load_writer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown()
        if error is None:
            self._wait()

    @contextmanager
    def keeping(self, groups: Sequence[ScoredGroup], batch: Batch, step: int) -> Iterator[None]:
        """Keeps the samples of `step`, whose log-probabilities the train workers hold until the block, which trains, ends.

        Raises the OSError of the file before it: at most one file is being written.
        """
        self._wait()
        kept = self._pool.submit(self._kept)
        yield
        self._writing = self._pool.submit(self._write, groups, batch, kept.result(), step)

    def keep_untrained(self, untrained: Sequence[Untrained], step: int) -> None:
        """Keeps samples that no step trains on. Raises the OSError of the file before it."""
        if untrained:
            self._wait()
            self._writing = self._pool.submit(self._write_untrained, untrained, step)

    def _wait(self) -> None:
        self._writing.result()

    def _kept(self) -> Kept:
        return kept_columns(self._train, self._deadline)

    def _write(self, groups: Sequence[ScoredGroup], batch: Batch, kept: Kept, step: int) -> None:
        rows = rollout_rows(groups, batch, kept, step, self._texts)
        self._files.write(step, rows)
        if self._trace is not None:
            self._trace.write(self._conversations.events(rows))

    def _write_untrained(self, untrained: Sequence[Untrained], step: int) -> None:
        self._files.write(step, untrained_rows(untrained, step, self._texts), OTHER)


def kept_columns(train: WorkerGroup, deadline: Deadline) -> Kept:
    """Returns what all train workers keep for the current step; nothing from a worker class without the method."""
    if METHOD not in train.role.methods:
        return {}
    joined: dict[str, dict[int, Array]] = defaultdict(dict)
    found: Sequence[Mapping[str, Mapping[int, Array]]] = train.call(METHOD, deadline=deadline)
    for columns in found:
        for name, rows in columns.items():
            joined[name].update(rows)
    return joined
