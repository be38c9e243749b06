"""A replay: one phase, started on all its shards at once, and the future of its result."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dagrl.errors import DataError, DeadlineError
from dagrl.executors.base import Executable
from dagrl.executors.packet import Packet
from dagrl.failures import SoFar
from dagrl.shapes import Array, Batch, Bucket, pad_rows

if TYPE_CHECKING:
    from dagrl.scheduler import Scheduler

AWAIT_TURN_S = 0.5
"""How long a thread waits for an `await`, before it looks whether that is still wanted."""


@dataclass(frozen=True)
class Split:
    """How the rows of a batch were shared out: the rows of each shard, the bucket, and the width of the batch's tokens."""

    rows: tuple[npt.NDArray[np.intp], ...]
    bucket: Bucket
    tokens: int

    def share(self, batch: Batch, shards: Sequence[int]) -> Batch:
        """The rows of some shards of `batch`, one shard's after the other's, each shard's padded to the bucket.

        Views of the batch where its rows lie like that already.
        """
        parts = [self.rows[shard] for shard in shards]
        order = parts[0] if len(parts) == 1 else np.concatenate(parts)
        numbers = order.tolist()
        first, end = (numbers[0], numbers[0] + len(numbers)) if numbers else (0, 0)
        dealt = slice(first, end) if numbers == list(range(first, end)) else order
        return Batch({name: self._field(array, parts, dealt) for name, array in batch.fields.items()}, batch.scalars)

    def _field(self, array: Array, parts: Sequence[npt.NDArray[np.intp]], order: slice | npt.NDArray[np.intp]) -> Array:
        """One field of shards whose rows are `parts`, all of them `order`: `[rows]` or `[rows, tokens]`."""
        wide = [self.bucket.tokens] if array.ndim == 2 else []
        kept = array[:, : self.bucket.tokens] if wide else array
        dealt = kept[order] if isinstance(order, slice) else kept.take(order, axis=0)  # copies whole rows, unlike indexing
        if list(dealt.shape) == [len(parts) * self.bucket.sequences, *wide]:
            return dealt
        return pad_rows(dealt, list(map(len, parts)), self.bucket)

    def restore(self, shards: Sequence[Batch]) -> Batch:
        """One batch from each shard's, in the order of the input's rows, padding removed. Raises DataError."""
        for shard in shards:
            self._check_result(shard, shards[0])
        order = np.argsort(np.concatenate(self.rows), kind="stable")
        fields = {}
        for name in shards[0].fields:
            kept = [shard[name][: len(rows)] for shard, rows in zip(shards, self.rows, strict=True)]
            joined = np.concatenate(kept)[order]
            fields[name] = joined[:, : self.tokens] if joined.ndim == 2 else joined
        return Batch(fields, shards[0].scalars)

    def _check_result(self, shard: Batch, first: Batch) -> None:
        """Raise DataError for a shard's batch that is not of the bucket's shape, or has other fields than the first's."""
        if shard.fields.keys() != first.fields.keys():
            raise DataError(f"one has the fields {sorted(first.fields)}, another one {sorted(shard.fields)}")
        narrow, wide = (self.bucket.sequences,), (self.bucket.sequences, self.bucket.tokens)
        for name, array in shard.fields.items():
            if array.shape not in (narrow, wide):
                raise DataError(
                    f"field {name!r} has the shape {list(array.shape)}, but the workers were given bucket {self.bucket}. "
                    f"Return {list(narrow)} or {list(wide)}, a row for each that came in, padding included"
                )


@dataclass(frozen=True)
class ReplayTiming:
    """When a replay was submitted and its result read (`time.perf_counter`), and the compute on each shard's longest path.

    `padding_share` is None where the input was not a batch.
    """

    started: float
    finished: float
    shards_busy_s: tuple[float, ...]
    padding_share: float | None

    @property
    def busy_s(self) -> float:
        """The compute on the longest path of all shards."""
        return max(self.shards_busy_s)

    @property
    def mean_busy_s(self) -> float:
        """The compute of a shard: less than the longest where shards wait for others."""
        return sum(self.shards_busy_s) / len(self.shards_busy_s)

    @property
    def seconds(self) -> float:
        """From submit to result."""
        return self.finished - self.started

    def overhead_s(self, free: float = 0.0) -> float:
        """Time with no worker of the longest path computing, after `free`, when its workers had ended what came before."""
        return max(0.0, self.finished - max(self.started, free) - self.busy_s)


def computing_s(timings: Iterable[ReplayTiming]) -> float:
    """Seconds in which a worker on the longest path of any of these replays was computing.

    A replay's compute is taken to lie right before its result was read. Exact for replays that follow each other: the sum
    of their `busy_s`. Of those that overlap (phases of different groups, several in flight) each second counts once.
    """
    seconds, until = 0.0, -math.inf
    for begin, end in sorted((timing.finished - timing.busy_s, timing.finished) for timing in timings):
        seconds += max(0.0, end - max(begin, until))
        until = max(until, end)
    return seconds


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
        grace_s: float,
    ) -> None:
        self.phase = phase
        self.number = number
        self.submitted = tuple(submitted)
        self.timing: ReplayTiming | None = None
        self._scheduler = scheduler
        self._split = split
        self._padding_share = padding_share
        self._started = time.perf_counter()
        self.so_far = SoFar(deque(range(len(self.submitted))), time.monotonic() + deadline_s, grace_s)
        self._outcome: Any = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether the result (or the error) has been read."""
        return self.timing is not None or self._error is not None

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the result until the replay's deadline.

        A phase that returned a `Batch` on every shard gives one `Batch`; any other a tuple with one value a graph (shard);
        a phase of several outputs a tuple of these. Raises PhaseError; DeadlineError when there is no result `timeout_s`
        seconds from now, though it may still come: the replay goes on, and can be asked again.
        """
        if not self.done:
            self._scheduler.finish(self, math.inf if timeout_s is None else time.monotonic() + timeout_s)
        if self._error is not None:
            raise self._error
        return self._outcome

    def ready(self) -> bool:
        """Whether `result` would return or raise at once; does not wait."""
        if not self.done:
            with suppress(DeadlineError):
                self._scheduler.finish(self, time.monotonic())
        return self.done

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        """In turns: the thread that waits for one is there until its end, also when this is cancelled."""
        while not self.done:
            with suppress(DeadlineError):
                return await asyncio.to_thread(self.result, AWAIT_TURN_S)
        return self.result()

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
