"""A replay: one phase, started on all its shards at once, and the future of its result."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dagrl.executors.base import Executable
from dagrl.executors.packet import Packet
from dagrl.shapes import Array, Batch, Bucket

if TYPE_CHECKING:
    from dagrl.scheduler import Scheduler


@dataclass(frozen=True)
class Split:
    """How the rows of a batch were shared out: the rows of each shard, the bucket, and the width of the batch's tokens."""

    rows: tuple[npt.NDArray[np.intp], ...]
    bucket: Bucket
    tokens: int

    def shares(self, batch: Batch) -> list[Batch]:
        """Each shard's rows of `batch`, padded to the bucket: views of the batch, or of one array a field."""
        runs = self._runs()
        fields = {name: self._field(array, runs) for name, array in batch.fields.items()}
        return [Batch({name: fields[name][shard] for name in fields}, batch.scalars) for shard in range(len(self.rows))]

    def _runs(self) -> list[slice] | None:
        """Each shard's rows as a slice of the batch, if all are and fill the bucket."""
        runs = []
        for rows in self.rows:
            if len(rows) != self.bucket.sequences or (len(rows) > 1 and not (np.diff(rows) == 1).all()):
                return None
            runs.append(slice(int(rows[0]), int(rows[0]) + len(rows)))
        return runs

    def _field(self, array: Array, runs: list[slice] | None) -> Sequence[Array]:
        """One field of each shard, `[sequences]` or `[sequences, tokens]`."""
        wide = [self.bucket.tokens] if array.ndim == 2 else []
        kept = array[:, : self.bucket.tokens] if wide else array
        if runs is not None and list(kept.shape[1:]) == wide:
            return [kept[run] for run in runs]
        shape = (len(self.rows), self.bucket.sequences, *wide)
        dealt = kept.take(np.concatenate(self.rows), axis=0)  # copies whole rows, many times as fast as indexing does
        if dealt.size == math.prod(shape):
            return list(dealt.reshape(shape))
        padded, start = np.zeros(shape, array.dtype), 0
        for shard, rows in enumerate(self.rows):
            part = dealt[start : start + len(rows)]
            place: tuple[int | slice, ...] = (shard, *map(slice, part.shape))
            padded[place] = part
            start += len(rows)
        return list(padded)

    def restore(self, shards: Sequence[Batch]) -> Batch:
        """One batch from each shard's, in the order of the input's rows, padding removed."""
        order = np.argsort(np.concatenate(self.rows), kind="stable")
        fields = {}
        for name in shards[0].fields:
            kept = [shard[name][: len(rows)] for shard, rows in zip(shards, self.rows, strict=True)]
            joined = np.concatenate(kept)[order]
            fields[name] = joined[:, : self.tokens] if joined.ndim == 2 else joined
        return Batch(fields, shards[0].scalars)


@dataclass(frozen=True)
class ReplayTiming:
    """When a replay was submitted and its result read (`time.perf_counter`), and the compute on each graph's longest path.

    `padding_share` is None where the input was not a batch.
    """

    started: float
    finished: float
    graphs_busy_s: tuple[float, ...]
    padding_share: float | None

    @property
    def busy_s(self) -> float:
        """The compute on the longest path of all graphs."""
        return max(self.graphs_busy_s)

    @property
    def mean_busy_s(self) -> float:
        """The compute of a graph: less than the longest where shards wait for others."""
        return sum(self.graphs_busy_s) / len(self.graphs_busy_s)

    @property
    def seconds(self) -> float:
        """From submit to result."""
        return self.finished - self.started

    def overhead_s(self, free: float = 0.0) -> float:
        """Time with no worker of the longest path computing, after `free`, when its workers had ended what came before."""
        return max(0.0, self.finished - max(self.started, free) - self.busy_s)


class Replay:
    """The future of a replay's result: `result()`, or `await` it."""

    def __init__(
        self,
        scheduler: Scheduler,
        phase: str,
        number: int,
        submitted: Sequence[tuple[Executable, Any]],
        split: Split | None,
        padding_share: float | None,
        deadline_s: float,
    ) -> None:
        self.phase = phase
        self.number = number
        self.submitted = tuple(submitted)
        self.timing: ReplayTiming | None = None
        self._scheduler = scheduler
        self._split = split
        self._padding_share = padding_share
        self._started = time.perf_counter()
        self.deadline = time.monotonic() + deadline_s
        self._outcome: Any = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether the result (or the error) has been read."""
        return self.timing is not None or self._error is not None

    def result(self) -> Any:
        """Wait for the result until the phase's deadline.

        A phase that returned a `Batch` on every shard gives one `Batch`; any other a tuple with one value a graph (shard);
        a phase of several outputs a tuple of these. Raises PhaseError.
        """
        self._scheduler.finish(self)
        if self._error is not None:
            raise self._error
        return self._outcome

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.result).__await__()

    def succeed(self, packets: Sequence[Sequence[Packet]]) -> None:
        """Take the packets of every graph (called by the scheduler)."""
        busy_s = tuple(max(packet.busy_s for packet in outputs) for outputs in packets)
        outputs = [self._merge([packet.value for packet in column]) for column in zip(*packets, strict=True)]
        self._outcome = outputs[0] if len(outputs) == 1 else tuple(outputs)
        self.timing = ReplayTiming(self._started, time.perf_counter(), busy_s, self._padding_share)

    def fail(self, error: Exception) -> None:
        """Take the error (called by the scheduler)."""
        self._error = error

    def _merge(self, values: Sequence[object]) -> object:
        batches = [value for value in values if isinstance(value, Batch)]
        if self._split is None or len(batches) != len(values):
            return tuple(values)
        return self._split.restore(batches)
