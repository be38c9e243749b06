"""Chooses the generation shard of each request, and the length of a quantum. The driver decides both between quanta.

Requests wait on the driver and are bound late: a shard receives new ones when it has free slots. Requests that are likely to
be long are sent first, to the shard whose unfinished requests have the fewest expected tokens in total, including tokens
already made, so that shards finish together. This is list scheduling by longest processing time (Graham 1969, "Bounds on
Multiprocessing Timing Anomalies", at worst 4/3 of the optimum). Expected lengths come from past completions of the prompt.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from dagrl.rl.generation import FIRST_QUANTUM


@dataclass
class LengthHistory:
    """Mean completion length by prompt. Unseen prompts have the mean of all prompts; before any completion, `default`."""

    default: float
    _sums: dict[Hashable, tuple[float, int]] = field(default_factory=dict)
    _total: tuple[float, int] = (0.0, 0)

    def record(self, key: Hashable, length: int) -> None:
        """Records a completion of prompt `key` with `length` tokens."""
        total, count = self._sums.get(key, (0.0, 0))
        self._sums[key] = (total + length, count + 1)
        self._total = (self._total[0] + length, self._total[1] + 1)

    def expected(self, key: Hashable) -> float:
        """Returns the expected length of the next completion of prompt `key`."""
        total, count = self._sums.get(key, self._total)
        return total / count if count else self.default


@dataclass(frozen=True)
class PendingRequest:
    """A request that no shard has yet: its id, its `cohort` (lower cohorts are sent first), and its expected tokens."""

    request_id: int
    cohort: int
    expected: float


@dataclass
class ShardLoad:
    """The expected tokens of each unfinished request of a shard, and how many requests it may hold."""

    slots: int
    requests: dict[int, float] = field(default_factory=dict)

    @property
    def free(self) -> int:
        """Requests that the shard can take."""
        return self.slots - len(self.requests)

    @property
    def work(self) -> float:
        """Expected tokens of all its requests, including tokens already made."""
        return sum(self.requests.values())


def dispatch(waiting: Sequence[PendingRequest], shards: Sequence[ShardLoad]) -> list[list[PendingRequest]]:
    """Returns the requests to send to each shard now, and adds them to its load. The rest keeps waiting.

    Example: expected lengths 9, 5, 4 over two free shards of two slots give [9] and [5, 4].
    """
    order = sorted(waiting, key=lambda item: (item.cohort, -item.expected))
    sent: list[list[PendingRequest]] = [[] for _ in shards]
    free = [(shard.work, index) for index, shard in enumerate(shards) if shard.free > 0]
    heapq.heapify(free)
    for item in order:
        if not free:
            break
        load, index = heapq.heappop(free)
        shards[index].requests[item.request_id] = item.expected
        sent[index].append(item)
        if shards[index].free > 0:
            heapq.heappush(free, (load + item.expected, index))
    return sent


LEAST_S = 0.06
"""The least seconds of a quantum, if the bounds allow: an engine then has work while the driver is busy elsewhere."""

AIM = 0.75
"""The share of `overhead_share` that quanta are sized for: overheads vary, and short quanta have theirs too."""


@dataclass
class QuantumSize:
    """Engine steps of a quantum on each of `shards` shards: `fixed`, or as many as take the same time on every shard.

    That time is at least `LEAST_S` on the slowest shard, and long enough that starting a quantum costs less than
    `overhead_share` of it. It is at most `seconds / in_flight`: a refit waits for all quanta in flight, and they take at
    most `seconds` together. That upper bound wins. Shards with fewer sequences or a faster core make more steps, so no shard
    waits for another at the end of a quantum. Times are smoothed over about ten quanta.

    The sizes are sent with the requests, so that all ranks of a shard run the same steps; their clocks would disagree.
    If steps become slower than measured, an engine of a single rank ends its quantum by the clock, after `most_s`.
    """

    fixed: int | None
    seconds: float
    in_flight: int = 1
    shards: int = 1
    overhead_share: float = 0.01
    step_s: dict[int, float] = field(default_factory=dict)
    overhead_s: float | None = None
    left_s: dict[int, float] = field(default_factory=dict)

    def record(self, engine_steps: Sequence[int], busy_s: Sequence[float], overhead_s: float) -> None:
        """Records a quantum: for each shard the steps made and the seconds its engine computed, and the overhead.

        Pass 0 steps for a shard whose requests ended early: its few steps bear all the fixed cost.
        """
        for shard, (steps, seconds) in enumerate(zip(engine_steps, busy_s, strict=True)):
            if steps > 0 and seconds > 0:
                self.step_s[shard] = _smooth(self.step_s.get(shard), seconds / steps)
        if any(engine_steps):
            self.overhead_s = _smooth(self.overhead_s, overhead_s)

    @property
    def most_s(self) -> float | None:
        """The most seconds of a quantum, so that all in flight take at most `seconds`; None if steps are fixed."""
        return self.seconds / self.in_flight if self.fixed is None else None

    def next(self) -> tuple[int, ...]:
        """Returns the engine steps of the next quantum on each shard."""
        if self.fixed is not None:
            return (self.fixed,) * self.shards
        slowest = max(self.step_s.values(), default=0.0)
        if not slowest or self.overhead_s is None:
            return (FIRST_QUANTUM,) * self.shards
        aim = AIM * self.overhead_share
        least = -_down(-max(self.overhead_s * (1 - aim) / aim, LEAST_S) / slowest)
        allowed = _down(self.seconds / self.in_flight / slowest)
        together_s = max(min(least, allowed), 1) * slowest
        return tuple(self._steps(shard, self.step_s.get(shard, slowest), together_s) for shard in range(self.shards))

    def _steps(self, shard: int, step_s: float, seconds: float) -> int:
        """Steps that a shard makes in `seconds` plus what its last quantum left over, within the bound."""
        seconds += self.left_s.get(shard, 0.0)
        steps = max(min(_down(seconds / step_s), _down(self.seconds / self.in_flight / step_s)), 1)
        self.left_s[shard] = min(max(seconds - steps * step_s, 0.0), step_s)
        return steps


def _smooth(before: float | None, value: float) -> float:
    return value if before is None else 0.9 * before + 0.1 * value


def _down(steps: float) -> int:
    """Rounds down, except for floating-point error."""
    return math.floor(steps + 1e-6)
