"""What a step's replays say of its time: the overhead of each, the idle share of each role, the overhead of the step.

times = ReplayTimes()
counted = times.count("train_step", ("train",), replay.timing)     # as each replay is read
times.attend("generation")                                         # the driver was at something else until now
metrics = times.lap(seconds, ("train", "generation"))              # of the step that ends here
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dagrl.replay import ReplayTiming, computing_s
from dagrl.telemetry.metrics import IDLE, QUANTUM_OVERHEAD, STEP_OVERHEAD


@dataclass(frozen=True)
class Counted:
    """A replay that a step counts: how long the workers of each of its roles were at it, a mean over shards.

    `overhead_s` is the time in which no worker on its longest path was computing, since they had ended what came before.
    """

    phase: str  # its name in `phases`
    roles: tuple[str, ...]
    timing: ReplayTiming
    busy_s: float
    overhead_s: float


class ReplayTimes:
    """See the module's first lines. Times are `time.perf_counter`'s, in seconds."""

    def __init__(self) -> None:
        self._counted: list[Counted] = []  # since the last lap
        self._before: list[Counted] = []  # what the last lap counted
        self._free: dict[str, float] = {}  # since when each role's workers may have waited for the driver
        self._latest: dict[str, float] = {}  # when the last replay of each role was submitted that was read
        self._ahead: dict[str, float] = {}  # busy seconds that laps have yet to count, by metric

    def count(self, phase: str, roles: Sequence[str], timing: ReplayTiming, busy_s: float | None = None) -> Counted:
        """Count a replay in this step; `busy_s` as in `Counted`, by default the longest path's."""
        busy_s = timing.mean_busy_s if busy_s is None else busy_s
        counted = Counted(phase, tuple(roles), timing, busy_s, self._overhead(roles, timing))
        self._counted.append(counted)
        return counted

    def attend(self, role: str) -> None:
        """The driver was at something else until now; that a role waited for it is no overhead of what it replays."""
        self._free[role] = time.perf_counter()

    def lap(self, total: float, roles: Iterable[str]) -> dict[str, float]:
        """Metrics of the step that ends here and took `total` seconds.

        `replay_overhead_s` is the time of its replays in which no worker on the longest path was computing, and
        `perf/step_overhead_s` all such time of the step, whatever the driver was at; `idle/<role>` is the share of the step
        in which the workers of a role ran no phase, a mean over its shards.
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
        """See `Counted`. Replays of one role run in the order of their submission: a quantum that is read after the refit
        behind it had ended before that, and how much later it is read says nothing of its workers."""
        if timing.started < max(self._latest.get(role, 0.0) for role in roles):
            return 0.0
        overhead_s = timing.overhead_s(max(self._free.get(role, 0.0) for role in roles))
        self._free.update(dict.fromkeys(roles, timing.finished))
        self._latest.update(dict.fromkeys(roles, timing.started))
        return overhead_s

    def _idle(self, role: str, counted: Sequence[Counted], total: float) -> float:
        """What replays read in this step did in the one before counts here; more than the step is long, in the next one."""
        return self._left(IDLE + role, sum(replay.busy_s for replay in counted if role in replay.roles), total) / total

    def _step_overhead(self, counted: list[Counted], total: float) -> float:
        """As `_idle`, of all roles together."""
        before, both = ([replay.timing for replay in replays] for replays in (self._before, self._before + counted))
        self._before = counted
        return self._left(STEP_OVERHEAD, computing_s(both) - computing_s(before), total)

    def _left(self, metric: str, busy: float, total: float) -> float:
        """What is left of a step's time; busy seconds that it has no room for count in the next one."""
        busy += self._ahead.get(metric, 0.0)
        self._ahead[metric] = max(0.0, busy - total)
        return max(0.0, total - busy)


def _quantum_overhead(counted: Sequence[Counted]) -> dict[str, float]:
    """What quanta cost beside the engines' own time."""
    quanta = [replay for replay in counted if replay.phase == "generate"]
    engines, overhead = sum(replay.timing.busy_s for replay in quanta), sum(replay.overhead_s for replay in quanta)
    return {QUANTUM_OVERHEAD: overhead / (engines + overhead)} if engines else {}
