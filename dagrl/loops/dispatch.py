"""Which request goes to which generation shard next, and how long a quantum is: decided on the driver, between quanta.

Requests wait on the driver and are bound late: a shard is sent new ones when it has free slots. Those that are likely to be
long go first, and to the shard whose unfinished requests are expected to have the fewest tokens in all, those already made
among them, so that shards finish together: list scheduling by longest processing time (Graham 1969, "Bounds on
Multiprocessing Timing Anomalies", 4/3 of the optimum at worst). How long a request will be is guessed from the past
completions of its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from dagrl.generation import FIRST_QUANTUM


@dataclass
class LengthHistory:
    """Mean completion length by prompt; prompts not seen yet count as the mean of all, and before any as `default`."""

    default: float
    _sums: dict[Hashable, tuple[float, int]] = field(default_factory=dict)
    _total: tuple[float, int] = (0.0, 0)

    def record(self, key: Hashable, length: int) -> None:
        """A completion of prompt `key` had `length` tokens."""
        total, count = self._sums.get(key, (0.0, 0))
        self._sums[key] = (total + length, count + 1)
        self._total = (self._total[0] + length, self._total[1] + 1)

    def expected(self, key: Hashable) -> float:
        """Tokens that the next completion of prompt `key` is likely to have."""
        total, count = self._sums.get(key, self._total)
        return total / count if count else self.default


@dataclass(frozen=True)
class Waiting:
    """A request that no shard has yet: its id, `cohort` (lower goes first, whatever its length), and likely tokens."""

    request_id: int
    cohort: int
    expected: float


@dataclass
class ShardLoad:
    """What a shard has: the expected tokens of each request that it has not finished, and how many it may hold."""

    slots: int
    requests: dict[int, float] = field(default_factory=dict)

    @property
    def free(self) -> int:
        """Requests that it can take."""
        return self.slots - len(self.requests)

    @property
    def work(self) -> float:
        """Expected tokens of all that it has, those that are made already among them."""
        return sum(self.requests.values())


def dispatch(waiting: Sequence[Waiting], shards: Sequence[ShardLoad], *, longest_first: bool = True) -> list[list[Waiting]]:
    """What each shard is sent now, and noted in its load; the rest stays where it is.

    Example: expected lengths 9, 5, 4 over two free shards of two slots give [9] and [5, 4]; first in, first out in turn
    gives [9, 4] and [5].
    """
    order = sorted(waiting, key=lambda item: (item.cohort, -item.expected if longest_first else 0.0))
    sent: list[list[Waiting]] = [[] for _ in shards]
    work = [shard.work for shard in shards]
    for item in order:
        free = [index for index, shard in enumerate(shards) if shard.free > 0]
        if not free:
            break
        index = min(free, key=lambda i: (work[i] if longest_first else len(shards[i].requests), i))
        shards[index].requests[item.request_id] = item.expected
        work[index] += item.expected
        sent[index].append(item)
    return sent


LEAST_S = 0.06
"""What a quantum takes at least, if it may: so long an engine has work while the driver is at something else."""

AIM = 0.75
"""The part of the overhead's bound that quanta are sized for: overheads vary, and short quanta have theirs too."""


@dataclass
class QuantumSize:
    """Engine steps of a quantum on each of `shards` shards: `fixed`, or as many as take the same time on all of them.

    That is long enough for the slowest to have `LEAST_S` and for starting a quantum to cost under `overhead_share` of the
    time of both, and the longer the more that takes; but within `seconds`, which are those of all quanta that are submitted
    at once (`in_flight`), as who wants the engines waits for them all: where one quantum costs over `overhead_share` of its
    part of these, that bound wins.
    Shards with fewer sequences, or a faster core, make more steps, so that none waits for another at the end of each.
    Times are smoothed over about ten quanta. The sizes travel with the requests, so that the ranks of a shard run the same
    steps: a clock on each would let them part. Where steps take longer than they did, an engine of one rank ends its quantum
    by the clock, after `most_s`.
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
        """A quantum kept each shard's engine busy for `busy_s` with so many steps made, and cost `overhead_s` beside that.

        0 steps: nothing is learned of a shard whose requests ended before, and whose few steps had all fixed costs to bear.
        """
        for shard, (steps, seconds) in enumerate(zip(engine_steps, busy_s, strict=True)):
            if steps > 0 and seconds > 0:
                self.step_s[shard] = _smooth(self.step_s.get(shard), seconds / steps)
        if any(engine_steps):
            self.overhead_s = _smooth(self.overhead_s, overhead_s)

    @property
    def most_s(self) -> float | None:
        """Seconds that a quantum may take, so that all in flight keep to `seconds`; None where steps are given instead."""
        return self.seconds / self.in_flight if self.fixed is None else None

    def next(self) -> tuple[int, ...]:
        """Engine steps of the next quantum on each shard."""
        if self.fixed is not None:
            return (self.fixed,) * self.shards
        slowest = max(self.step_s.values(), default=0.0)
        if not slowest or self.overhead_s is None:
            return (FIRST_QUANTUM,) * self.shards
        aim = AIM * self.overhead_share
        least = _up(max(self.overhead_s * (1 - aim) / aim, LEAST_S) / slowest)
        allowed = _down(self.seconds / self.in_flight / slowest)
        together_s = max(min(least, allowed), 1) * slowest
        return tuple(self._steps(shard, self.step_s.get(shard, slowest), together_s) for shard in range(self.shards))

    def _steps(self, shard: int, step_s: float, seconds: float) -> int:
        """Steps that a shard makes in so many seconds, with what its last quantum had left of them, within the bound."""
        seconds += self.left_s.get(shard, 0.0)
        steps = max(min(_down(seconds / step_s), _down(self.seconds / self.in_flight / step_s)), 1)
        self.left_s[shard] = min(max(seconds - steps * step_s, 0.0), step_s)
        return steps


def _smooth(before: float | None, value: float) -> float:
    return value if before is None else 0.9 * before + 0.1 * value


def _up(steps: float) -> int:
    """Rounded up, but for an error of floating point."""
    return math.ceil(steps - 1e-6)


def _down(steps: float) -> int:
    return math.floor(steps + 1e-6)
