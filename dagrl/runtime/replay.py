"""A replay: one run of a phase on all its shards, and the future of its result."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dagrl.errors import DeadlineError, PhaseError
from dagrl.runtime.edges.packet import Packet
from dagrl.runtime.failures import PendingReplay, collect_outcome
from dagrl.runtime.shapes import Bucket


@dataclass(frozen=True)
class ReplayTiming:
    """When a replay was submitted and its result read (`perf_counter`), and the compute on each shard's longest path."""

    started: float
    finished: float
    shards_busy_s: tuple[float, ...]
    padding_share: float | None  # None if the input was not a batch

    @property
    def busy_s(self) -> float:
        """The compute on the longest path of all shards."""
        return max(self.shards_busy_s)

    @property
    def mean_busy_s(self) -> float:
        """The mean compute of the shards. Less than `busy_s` if some shards wait for others."""
        return sum(self.shards_busy_s) / len(self.shards_busy_s)

    def overhead_s(self, free: float = 0.0) -> float:
        """Returns the seconds after `free`, the end of earlier work, in which no worker of the longest path computed."""
        return max(0.0, self.finished - max(self.started, free) - self.busy_s)


def computing_s(timings: Iterable[ReplayTiming]) -> float:
    """Returns the seconds in which a worker on the longest path of any of these replays computed.

    Assumes that a replay's compute ends when its result is read. Exact for replays that follow each other: the sum of their
    `busy_s`. Seconds in which replays overlap (phases of different groups, several in flight) count once.
    """
    seconds, until = 0.0, -math.inf
    for begin, end in sorted((timing.finished - timing.busy_s, timing.finished) for timing in timings):
        seconds += max(0.0, end - max(begin, until))
        until = max(until, end)
    return seconds


class Replay:
    """The future of a replay's result."""

    def __init__(
        self,
        pending: PendingReplay,
        queue: ReplayQueue,
        shards: Sequence[int],
        join: Callable[[list[Any]], object] = tuple,
        padding_share: float | None = None,
        on_success: Callable[[float], None] = lambda busy_s: None,
    ) -> None:
        """`join`: makes a result of the shards' results. `on_success`: called with the compute on the longest path."""
        self.pending = pending
        self.phase = pending.phase
        self.number = pending.number
        self.timing: ReplayTiming | None = None
        self._queue = queue
        self.shards = list(shards)
        """The shard of each graph, ascending: all, unless some have no workers (`Scheduler.recover`)."""
        self._join = join
        self._padding_share = padding_share
        self._on_success = on_success
        self._started = time.perf_counter()
        self._outcome: Any = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether the result or the error has been read."""
        return self.timing is not None or self._error is not None

    def result(self, timeout_s: float | None = None) -> Any:
        """Waits for the result until the replay's deadline, and returns it.

        If all shards return a `Batch`, the result is one `Batch`. A codec joins results of its types. Any others are a tuple
        with one value per shard.

        Raises PhaseError; DeadlineError if there is no result within `timeout_s` seconds. The replay continues then, and can
        be asked again.
        """
        if not self.done:
            self._queue.finish(self, math.inf if timeout_s is None else time.monotonic() + timeout_s)
        if self._error is not None:
            raise self._error
        return self._outcome

    def partial(self) -> dict[int, Any]:
        """Returns the results of a failed replay by shard, of the graphs that had ended without a failure."""
        return {self.shards[graph]: mine.value for graph, mine in self.pending.packets.items() if not mine.failures}

    def succeed(self, packets: Sequence[Packet]) -> None:
        """Sets the result from the packet of every graph. Raises PhaseError if the shards' results do not fit together."""
        try:
            busy_s = tuple(packet.busy_s for packet in packets)
            self._outcome = self._join([packet.value for packet in packets])
        except Exception as error:  # the replay is over, and its graphs are whole
            raise PhaseError((), f"{self.pending.name}: the results of its shards do not fit together: {error}") from error
        self.timing = ReplayTiming(self._started, time.perf_counter(), busy_s, self._padding_share)
        self._on_success(self.timing.busy_s)

    def fail(self, error: Exception) -> None:
        self._error = error


@dataclass
class Durations:
    """The longest compute of a phase's replays so far, and the time after which another one counts as hung.

    The first replay of a bucket may take any time up to its deadline: it may compile or capture what the warm-up did not.
    """

    factor: float | None
    floor_s: float
    longest_s: float = 0.0
    buckets: set[Bucket | None] = field(default_factory=set)

    def add(self, bucket: Bucket | None, busy_s: float) -> None:
        """Adds a replay, at the bucket of its batch (None: its input is no batch)."""
        self.buckets.add(bucket)
        self.longest_s = max(self.longest_s, busy_s)

    def hang_s(self, bucket: Bucket | None) -> float:
        """Returns after what time of computing a replay hangs; infinite for the first one of a bucket."""
        if self.factor is None or bucket not in self.buckets:
            return math.inf
        return max(self.floor_s, self.factor * self.longest_s)


class ReplayQueue:
    """The `replays` of one phase that are in flight, oldest first. Their results are read in that order.

    `broken`: the first failure that broke a graph, by role. This phase breaks `roles`: those that share actors, whose
    tickets order all that an actor runs, break together.
    """

    def __init__(self, broken: dict[str, PhaseError], roles: Sequence[str]) -> None:
        self.replays: deque[Replay] = deque()
        self._reading = threading.RLock()
        self._broken, self._roles = broken, roles

    def break_roles(self, error: PhaseError) -> None:
        for role in self._roles:
            self._broken.setdefault(role, error)

    def finish(self, replay: Replay, until: float = math.inf) -> None:
        """Reads outcomes up to that of `replay`. Raises DeadlineError if it is not there by `until` (`time.monotonic`)."""
        if not self._reading.acquire(blocking=until == math.inf):
            if not self._reading.acquire(timeout=max(0.0, until - time.monotonic())):
                raise DeadlineError(f"phase {replay.phase!r}: another thread waits for its results; ask again")
        try:
            while (oldest := next(iter(self.replays), None)) and (not replay.done or oldest is replay):
                self._finish_one(oldest, until)
        finally:
            self._reading.release()

    def _finish_one(self, replay: Replay, until: float) -> None:
        """Reads the oldest replay, and removes it unless that is interrupted or takes longer than `until`."""
        try:
            if not replay.done:  # else an interrupt came before it was removed
                replay.succeed(collect_outcome(replay.pending, until))
        except PhaseError as error:
            if not replay.done:  # else a teardown has ended it and closed its graphs
                if error.breaks:
                    self.break_roles(error)
                replay.fail(error)
        with suppress(ValueError):  # a teardown may have removed it meanwhile
            self.replays.remove(replay)
