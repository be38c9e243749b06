"""Accounts for the time of a step from its replays: the overhead of each, the idle share of each role, the step's overhead.

times = ReplayTimes()
counted = times.count("train_step", ("train",), replay.timing)     # as each replay is read
times.exclude_wait("generation")                                   # the driver was busy elsewhere until now
metrics = times.close_step(seconds, ("train", "generation"))       # metrics of the step that ends here
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dagrl.runtime.replay import ReplayTiming, computing_s
from dagrl.telemetry.metrics import IDLE, QUANTUM_OVERHEAD, STEP_OVERHEAD


@dataclass(frozen=True)
class CountedReplay:
    """A replay counted in a step. `busy_s` is how long the workers of each role worked on it, a mean over shards.

    `overhead_s` is the time without compute on its longest path, counted from when the workers were free.
    """

    phase: str  # its name in `phases`
    roles: tuple[str, ...]
    timing: ReplayTiming
    busy_s: float
    overhead_s: float


class ReplayTimes:
    """See the module's docstring. Times are those of `time.perf_counter`, in seconds."""

    def __init__(self) -> None:
        self._counted: list[CountedReplay] = []  # in this step
        self._before: list[CountedReplay] = []  # in the step before
        self._free: dict[str, float] = {}  # when the workers of each role were last free
        self._latest: dict[str, float] = {}  # when the last replay read of each role was submitted
        self._ahead: dict[str, float] = {}  # busy seconds left for later steps, by metric

    def count(self, phase: str, roles: Sequence[str], timing: ReplayTiming, busy_s: float | None = None) -> CountedReplay:
        """Counts a replay in this step. `busy_s` defaults to the compute on the longest path of each shard, a mean."""
        busy_s = timing.mean_busy_s if busy_s is None else busy_s
        counted = CountedReplay(phase, tuple(roles), timing, busy_s, self._overhead(roles, timing))
        self._counted.append(counted)
        return counted

    def exclude_wait(self, role: str) -> None:
        """Keeps the role's wait for the driver up to now out of the overhead of its next replay."""
        self._free[role] = time.perf_counter()

    def close_step(self, total: float, roles: Iterable[str]) -> dict[str, float]:
        """Ends the step, which took `total` seconds, and returns its metrics.

        `replay_overhead_s` is the time of its replays without compute on the longest path, `perf/step_overhead_s` all such
        time of the step. `idle/<role>` is the share of the step in which the workers of a role ran no phase, a mean over its
        shards.
        """
        counted, self._counted = self._counted, []
        padding = [replay.timing.padding_share for replay in counted if replay.timing.padding_share is not None]
        return {
            **_quantum_overhead(counted),
            **{IDLE + role: self._idle(role, counted, total) for role in roles},
            "replays": float(len(counted)),
            STEP_OVERHEAD: self._step_overhead(counted, total),
            "replay_overhead_s": sum(replay.overhead_s for replay in counted),
            "padding_share": sum(padding) / len(padding) if padding else 0.0,
        }

    def _overhead(self, roles: Sequence[str], timing: ReplayTiming) -> float:
        """See `CountedReplay`. A role runs its replays in the order of submission. A quantum that is read after the refit
        behind it ended before that refit, so when it is read says nothing about its workers."""
        if timing.started < max(self._latest.get(role, 0.0) for role in roles):
            return 0.0
        overhead_s = timing.overhead_s(max(self._free.get(role, 0.0) for role in roles))
        self._free.update(dict.fromkeys(roles, timing.finished))
        self._latest.update(dict.fromkeys(roles, timing.started))
        return overhead_s

    def _idle(self, role: str, counted: Sequence[CountedReplay], total: float) -> float:
        """Counts a replay in the step that reads it. Busy time beyond the step's length is carried to the next step."""
        return self._left(IDLE + role, sum(replay.busy_s for replay in counted if role in replay.roles), total) / total

    def _step_overhead(self, counted: list[CountedReplay], total: float) -> float:
        """Returns the seconds in which no role computed; busy time is carried over as in `_idle`."""
        before, both = ([replay.timing for replay in replays] for replays in (self._before, self._before + counted))
        self._before = counted
        return self._left(STEP_OVERHEAD, computing_s(both) - computing_s(before), total)

    def _left(self, metric: str, busy: float, total: float) -> float:
        """Returns the step's time minus `busy`. Busy seconds beyond the step's length are carried to the next step."""
        busy += self._ahead.get(metric, 0.0)
        self._ahead[metric] = max(0.0, busy - total)
        return max(0.0, total - busy)


def _quantum_overhead(counted: Sequence[CountedReplay]) -> dict[str, float]:
    """Returns the overhead of quanta, as a share of their time."""
    quanta = [replay for replay in counted if replay.phase == "generate"]
    engines, overhead = sum(replay.timing.busy_s for replay in quanta), sum(replay.overhead_s for replay in quanta)
    return {QUANTUM_OVERHEAD: overhead / (engines + overhead)} if engines else {}
