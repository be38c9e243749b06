"""Replays the phases of a run by name, and accounts for their time.

    metrics = replays.replay("train_step", batch)            # submit and wait
    quantum = replays.submit("generate", requests, rows)     # start; read it later
    result, counted = replays.collect("generate", quantum)
    metrics = replays.close_step(tokens)                     # timing metrics of the step

On shared GPUs (`policy.generation.colocated.enabled`) each replay first exchanges the memory that its roles need. A step's
timing metrics are the overhead of its replays, the share of its time in which each role was idle, and its own overhead.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dagrl.run.colocated import SharedDevices
from dagrl.runtime.phase import Phase
from dagrl.runtime.replay import Replay, ReplayTiming, computing_s
from dagrl.runtime.schedule import Scheduler
from dagrl.telemetry.metrics import IDLE, QUANTUM_OVERHEAD, STEP_OVERHEAD, TIMING, TOKENS_PER_SEC, TOKENS_PER_SEC_PER_GPU
from dagrl.telemetry.timing import PhaseClock


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
    """Accounts for the time of each step. Times are those of `time.perf_counter`, in seconds."""

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
        quanta = [replay for replay in counted if replay.phase == "generate"]
        engines, overhead = sum(replay.timing.busy_s for replay in quanta), sum(replay.overhead_s for replay in quanta)
        padding = [replay.timing.padding_share for replay in counted if replay.timing.padding_share is not None]
        return {
            **({QUANTUM_OVERHEAD: overhead / (engines + overhead)} if engines else {}),
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


class Tape(Protocol):
    """Records replays; `dagrl.run.tape` has it."""

    def adapted(self, value: object, /) -> object:
        """Returns the input to submit instead of `value`."""

    def begin(self, phase: str, value: object, rows: Sequence[Any] | None, replay: Replay, /) -> None:
        """Takes a replay that was submitted."""

    def end(self, replay: Replay, result: object, /) -> None:
        """Takes its result."""


@dataclass
class Replays:
    """The phases of a run by their key in `phases`. `devices` is the number of GPUs (or workers) the run uses."""

    phases: Mapping[str, Phase]
    scheduler: Scheduler
    clock: PhaseClock
    devices: int
    shared: SharedDevices | None = None  # only where train and generation workers share GPUs
    times: ReplayTimes = field(default_factory=ReplayTimes)
    tape: Tape | None = None
    _running: list[tuple[Phase, Replay]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.shared is not None:
            self.shared.finish = self._finish

    def takes_turns(self, role: str) -> bool:
        """Returns whether the role cannot work at the same time as the train workers."""
        return self.shared is not None and role in self.shared.roles

    def hold(self, *roles: str, keep_generation_weights: bool = False) -> None:
        """Moves memory so that `roles` can compute. Call it before plain worker calls; replays do it themselves."""
        if self.shared is not None:
            self.shared.give_to(roles, keep_generation_weights=keep_generation_weights)

    def replay(self, name: str, value: object, rows: Sequence[npt.NDArray[np.intp]] | None = None) -> Any:
        """Replays a phase and waits for its result. `rows[shard]` are the rows each shard gets (see `Scheduler.replay`)."""
        return self.collect(name, self.submit(name, value, rows))[0]

    def submit(self, name: str, value: object, rows: Sequence[npt.NDArray[np.intp]] | None = None) -> Replay:
        """Starts a replay that `collect` reads; `rows` as in `replay`."""
        phase = self.phases[name]
        self.hold(*phase.roles)
        if self.tape is not None:
            value = self.tape.adapted(value)
        with self.clock.measure(name):
            replay = self.scheduler.replay(phase, value, rows=rows)
        if self.tape is not None:
            self.tape.begin(name, value, rows, replay)
        if self.shared is not None:
            self._running = [(other, running) for other, running in self._running if not running.done] + [(phase, replay)]
        return replay

    def _finish(self, role: str) -> None:
        """Waits for the replays of `role`, whose memory another role is about to get; `collect` reads them later."""
        for phase, replay in self._running:
            if role in phase.roles:
                replay.result()

    def collect(
        self, name: str, replay: Replay, busy_s: Callable[[Any], float | None] | None = None
    ) -> tuple[Any, CountedReplay]:
        """Waits for a replay started by `submit` and counts it in this step.

        In a phase of two roles one may wait for the other inside its node. `busy_s(result)` then returns how long both
        worked; without it, or if it returns None, all roles count as busy for the longest path.
        """
        with self.clock.measure(name):
            result = replay.result()
        assert replay.timing is not None
        if self.tape is not None:
            self.tape.end(replay, result)
        return result, self.times.count(name, self.phases[name].roles, replay.timing, busy_s(result) if busy_s else None)

    def close_step(self, tokens: int) -> dict[str, float]:
        """Ends the step that trained on `tokens` tokens and returns its timing metrics; see `ReplayTimes.close_step`."""
        times = self.clock.close_step()
        total = times[TIMING + "total"]
        return {
            **times,
            **self.times.close_step(total, self.scheduler.groups),
            TOKENS_PER_SEC: tokens / total,
            TOKENS_PER_SEC_PER_GPU: tokens / total / self.devices,
        }
