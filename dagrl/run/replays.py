"""Replays the phases of a run by name, and accounts for their time.

    metrics = replays.replay("train_step", batch)            # submit and wait
    quantum = replays.submit("generate", requests, rows)     # start; read it later
    result, counted = replays.collect("generate", quantum)
    metrics = replays.close_step(tokens)                     # timing metrics of the step

On shared GPUs (`policy.generation.colocated.enabled`) each replay first exchanges the memory that its roles need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dagrl.run.colocated import SharedDevices
from dagrl.run.replay_times import CountedReplay, ReplayTimes
from dagrl.runtime.phase import Phase
from dagrl.runtime.replay import Replay, ReplayTiming
from dagrl.runtime.schedule import Scheduler
from dagrl.telemetry.metrics import TIMING, TOKENS_PER_SEC, TOKENS_PER_SEC_PER_GPU
from dagrl.telemetry.timing import PhaseClock


@dataclass
class Replays:
    """The phases of a run by their key in `phases`. `devices` is the number of GPUs (or workers) the run uses."""

    phases: Mapping[str, Phase]
    scheduler: Scheduler
    clock: PhaseClock
    devices: int
    shared: SharedDevices | None = None  # only where train and generation workers share GPUs
    times: ReplayTimes = field(default_factory=ReplayTimes)
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
        with self.clock.measure(name):
            replay = self.scheduler.replay(phase, value, rows=rows)
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
        return result, self.count(name, replay.timing, busy_s(result) if busy_s else None)

    def count(self, name: str, timing: ReplayTiming, busy_s: float | None = None) -> CountedReplay:
        """Counts a replay of `phases.<name>` in this step; see `ReplayTimes.count`."""
        return self.times.count(name, self.phases[name].roles, timing, busy_s)

    def exclude_wait(self, role: str) -> None:
        """Keeps the role's wait for the driver up to now out of the overhead; see `ReplayTimes.exclude_wait`."""
        self.times.exclude_wait(role)

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
