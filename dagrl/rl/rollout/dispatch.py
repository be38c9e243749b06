"""Chooses the generation shard of each request, and the length of a quantum. The driver decides both between quanta.

Requests wait on the driver and are bound late: a shard receives new ones when it has free slots, and the shard with the most
free slots first, so that shards finish together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dagrl.rl.generation import FIRST_QUANTUM


@dataclass
class ShardLoad:
    """The unfinished requests of a shard, and how many it may hold."""

    slots: int
    requests: set[int] = field(default_factory=set)

    @property
    def free(self) -> int:
        """Requests that the shard can take."""
        return self.slots - len(self.requests)


def dispatch(waiting: Mapping[int, int], shards: Sequence[ShardLoad]) -> list[list[int]]:
    """Returns the requests to send to each shard now, and adds them to its load. The rest keeps waiting.

    `waiting` has the cohort of each request; lower cohorts are sent first.
    """
    sent: list[list[int]] = [[] for _ in shards]
    for request in sorted(waiting, key=waiting.__getitem__):
        index = max(range(len(shards)), key=lambda index: shards[index].free)
        if shards[index].free <= 0:
            break
        shards[index].requests.add(request)
        sent[index].append(request)
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
