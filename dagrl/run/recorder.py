"""Records a run: metrics of each step, progress on the terminal, the workers' trace, and the final summary."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from dagrl.rl.rollout.scoring import Untrained
from dagrl.run.rollout_log import RolloutLog
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.progress import Progress
from dagrl.telemetry.record import RunPaths, RunRecord
from dagrl.telemetry.timing import PhaseClock
from dagrl.telemetry.trace import TraceEvent, TraceWriter

TRACE_PERIOD = 20
"""Steps between two collections of the workers' trace events."""


@dataclass(frozen=True)
class Recorder:
    """Writes to `paths`. `at_end` runs its callbacks after the workers have ended."""

    paths: RunPaths
    record: RunRecord
    progress: Progress
    trace: TraceWriter | None
    clock: PhaseClock
    groups: Sequence[WorkerGroup]
    at_end: ExitStack
    rollouts: RolloutLog | None = None

    def step(self, stage: str, step: int, position: int, total: int, metrics: dict[str, float]) -> None:
        """Records finished step `step` of the run, which is step `position` of `total` in its stage."""
        self.record.log(step, stage, metrics)
        self.progress.step(position, total, metrics, stage=stage)
        if step % TRACE_PERIOD == 0:
            self.write_trace()

    def keep_untrained(self, untrained: Sequence[Untrained], step: int) -> None:
        """Keeps samples of `step` that no step trains on in `rollouts/`, if the run has that."""
        if self.rollouts is not None:
            self.rollouts.keep_untrained(untrained, step)

    def write_trace(self) -> None:
        """Moves the workers' trace events into the trace file."""
        if self.trace is None:
            return
        for group in self.groups:
            for rank, runs in enumerate(group.drain_runs()):
                process = process_label(group, rank)
                self.trace.write(
                    TraceEvent(
                        run.label.partition(".")[2],
                        "warm-up" if run.warmup else "replay",
                        run.start_ns,
                        run.end_ns - run.start_ns,
                        process,
                        "replays",
                        {"phase": run.phase, "replay": run.replay},
                    )
                    for run in runs
                )

    def summarize(self) -> None:
        """Shows where the time went, and the files written, when the workers have ended. A failed run is summarized too."""
        self.at_end.callback(lambda: self.progress.summary(self.clock.totals, self.paths.written()))


def process_label(group: WorkerGroup, rank: int) -> str:
    """Returns the name of a worker's row in the trace."""
    return f"{group.role.name} {rank} ({group.layout.coordinates(rank)})"
