"""What every loop stands on: a run whose workers are up and whose phases are compiled (`start.py` makes it so).

A loop replays phases through its session, which has their time counted, records steps and saves checkpoints.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dagrl.checkpoint import Checkpoint, CheckpointStore, TrainState
from dagrl.config import Config
from dagrl.config.settings import is_colocated, layouts
from dagrl.errors import ConfigError
from dagrl.loops.colocated import SharedDevices
from dagrl.loops.replay_times import Counted, ReplayTimes
from dagrl.loops.saving import CheckpointSaver, require_shared
from dagrl.loops.stop import StopSignal
from dagrl.preflight import Inputs, load_phase
from dagrl.replay import Replay, ReplayTiming
from dagrl.scheduler import Scheduler
from dagrl.shapes import Batch
from dagrl.telemetry.metrics import (
    GRAD_NORM,
    SKIPPED_STEPS,
    TIMING,
    TOKENS_PER_SEC,
    TOKENS_PER_SEC_PER_GPU,
    VALIDATION,
    StepMetrics,
    merge_step_metrics,
)
from dagrl.telemetry.plot import plot_run
from dagrl.telemetry.progress import Progress
from dagrl.telemetry.record import RunPaths, RunRecord
from dagrl.telemetry.timing import PhaseClock
from dagrl.telemetry.trace import TraceEvent, TraceWriter
from dagrl.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

TRACE_PERIOD = 20
"""Steps between two collections of the workers' trace events."""


@dataclass
class Session:
    """One run, ready for its first step. `step` is the last finished step, over all stages.

    `savers` write what belongs to a checkpoint beside the workers' and the driver's state into its directory.
    """

    config: Config
    paths: RunPaths
    inputs: Inputs
    train: WorkerGroup
    generation: WorkerGroup | None
    scheduler: Scheduler
    record: RunRecord
    trace: TraceWriter | None
    progress: Progress
    clock: PhaseClock
    store: CheckpointStore
    stop: StopSignal
    resumed: Checkpoint | None
    ended: ExitStack  # what is left to do once the workers are gone
    step: int = 0
    saved_step: int = 0
    state: TrainState = field(default_factory=lambda: TrainState(step=0))
    savers: list[Callable[[Path], None]] = field(default_factory=list)
    shared: SharedDevices | None = None  # where train and generation workers share their GPUs
    replay_times: ReplayTimes = field(default_factory=ReplayTimes)
    saver: CheckpointSaver = field(init=False)

    def __post_init__(self) -> None:
        self.saver = CheckpointSaver(self.config, self.store, self.train)

    def hold(self, *roles: str, keep_generation_weights: bool = False) -> None:
        """Give `roles` the memory they compute with; replays do so themselves, other calls of workers need it before."""
        if self.shared is not None:
            self.shared.give_to(roles, keep_generation_weights=keep_generation_weights)

    def replay(self, name: str, value: object) -> Any:
        """Replay the phase `phases.<name>`, wait for it, and count its time and overhead."""
        self.hold(*load_phase(self.config.phases, name).roles)
        with self.clock.measure(name):
            return self._result(name, self.submit(name, value))[0]

    def submit(self, name: str, value: object, rows: Sequence[npt.NDArray[np.intp]] | None = None) -> Replay:
        """Start a replay to be read by `collect`; `rows` are those of each shard (see `Scheduler.replay`)."""
        phase = load_phase(self.config.phases, name)
        self.hold(*phase.roles)
        return self.scheduler.replay(phase, value, rows=rows)

    def collect(self, name: str, replay: Replay, busy_s: Callable[[Any], float | None] | None = None) -> tuple[Any, Counted]:
        """Wait for a replay started by `submit`, and count the time waited and the overhead.

        Workers of one role can wait in their node for those of another. In such a phase `busy_s` reads from the result for
        how long both were at it; without it, or where it gives None, all roles were busy for as long as the longest path.
        """
        with self.clock.measure(name):
            return self._result(name, replay, busy_s)

    def _result(self, name: str, replay: Replay, busy_s: Callable[[Any], float | None] | None = None) -> tuple[Any, Counted]:
        result = replay.result()
        assert replay.timing is not None
        return result, self.count(name, replay.timing, busy_s(result) if busy_s else None)

    def count(self, name: str, timing: ReplayTiming, busy_s: float | None = None) -> Counted:
        """Count a replay of `phases.<name>` in this step; see `ReplayTimes.count`."""
        return self.replay_times.count(name, load_phase(self.config.phases, name).roles, timing, busy_s)

    def attend(self, role: str) -> None:
        """See `ReplayTimes.attend`."""
        self.replay_times.attend(role)

    def lap(self, tokens: int) -> dict[str, float]:
        """Timing metrics of the step that ends here, in which `tokens` tokens were trained on; see `ReplayTimes.lap`."""
        times = self.clock.lap()
        total = times[TIMING + "total"]
        return {
            **times,
            **self.replay_times.lap(total, [group.role.name for group in self.groups]),
            TOKENS_PER_SEC: tokens / total,
            TOKENS_PER_SEC_PER_GPU: tokens / total / devices_of(self.config),
        }

    def train_on(self, phase: str, batch: Batch) -> dict[str, float]:
        """Replay a training (or evaluation) phase on a global batch; metrics over all shards."""
        return self.step_on(phase, batch).flat()

    def step_on(self, phase: str, batch: Batch, rows: Sequence[int] | None = None, parts: int = 0) -> StepMetrics:
        """`train_on`, with the metrics still apart by how they are joined.

        `rows`: the only ones to be replayed of the batch, as those of the others' gradients are accumulated, in `parts`.
        """
        mask = batch["loss_mask"].astype("float64")
        batch = batch.with_scalars(
            global_valid_tokens=float(mask.sum()), global_valid_sequences=float((mask.sum(axis=1) > 0).sum())
        )
        if rows is not None:
            batch = batch.select(rows).with_scalars(parts=float(parts))
        shards: Sequence[StepMetrics] = self.replay(phase, batch)
        metrics = merge_step_metrics(shards)
        self._warn_of_skipped(metrics.shared)
        return metrics

    def _warn_of_skipped(self, shared: Mapping[str, float]) -> None:
        """Workers' own warnings stay in Ray's logs; they count the skipped optimizer steps of the whole run."""
        norm, skipped = shared.get(GRAD_NORM), int(shared.get(SKIPPED_STEPS, 0))
        if norm is not None and not (math.isfinite(norm) and norm > 0):
            what = "optimizer step skipped, weights unchanged"
            logger.warning("step %d: gradient norm is %s: %s (%d so far)", self.step + 1, norm, what, skipped)

    def finish_step(self, stage: str, position: int, total: int, metrics: dict[str, float], state: TrainState) -> None:
        """Record a finished step, show it, and save if it is time to."""
        self.step = state.step
        self.state = state
        self.record.log(self.step, stage, metrics)
        self.progress.step(position, total, metrics, stage=stage)
        self.saver.poll()
        if self.config.checkpointing.enabled and self.step % self.config.checkpointing.save_period == 0:
            self.save()
        if self.step % TRACE_PERIOD == 0:
            self.write_trace()
        self.stop.check()

    def save_last(self) -> None:
        """Save a checkpoint of the last finished step, unless it is saved already, and wait until it is complete."""
        self.save()
        with self.clock.measure("checkpoint"):
            self.saver.finish()

    def save(self) -> None:
        """Save a checkpoint of the last finished step, unless it is saved already."""
        if self.step in (0, self.saved_step):
            return
        self.progress.status("saving a checkpoint")
        self.hold("train", keep_generation_weights=True)
        with self.clock.measure("checkpoint"):
            self.saver.save(self.state, self.savers)
        self.saved_step = self.step

    def write_trace(self) -> None:
        """Move what the workers remember of their replays into the trace file."""
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

    def finish(self) -> None:
        """Write what a finished run leaves: the last checkpoint, the policy for Hugging Face, the trace, the plot."""
        if self.config.checkpointing.enabled:
            self.save_last()
        if self.config.checkpointing.export_hf:
            self.progress.stage("Writing the final policy")
            self.hold("train", keep_generation_weights=True)
            self.train.call("export_hf", str(self.paths.final_model), deadline=self.config.timeouts.checkpoint)
            require_shared(self.paths.final_model / "config.json")
            self.inputs.tokenizer.save_pretrained(self.paths.final_model)

    @property
    def groups(self) -> tuple[WorkerGroup, ...]:
        """The worker groups of the run."""
        return (self.train,) if self.generation is None else (self.train, self.generation)

    def metric(self, stage: str, metrics: Mapping[str, float]) -> float | None:
        """What checkpoints are ranked by, `checkpointing.metric_name`; None where this step did not measure it.

        Raises ConfigError for a name that is missing where it had to be: in a validation, or a step that learned.
        """
        name = self.config.checkpointing.metric_name
        if name is None:
            return None
        validated = any(key.startswith(VALIDATION) for key in metrics)
        due = validated if name.startswith(VALIDATION) else "loss" in metrics
        if due and name not in metrics and stage == self.config.algorithm:
            raise ConfigError(
                f"checkpointing.metric_name is {name!r}, which a step of {stage} does not have; it has: "
                f"{', '.join(sorted(metrics))}"
            )
        return metrics.get(name)

    def validated_at_start(self, stage: str, metrics: dict[str, float]) -> None:
        """Record what validation found before the first step of a stage."""
        self.record.log(self.step, stage, metrics)
        self.metric(stage, metrics)

    def summarize(self) -> None:
        """Plot what was recorded while the workers end; then show where the time went and what was written.

        Also of a run that failed.
        """
        self.ended.callback(lambda: self.progress.summary(self.clock.totals, self.paths.written()))
        if self.config.logger.plot_enabled and self.step:
            thread = self.ended.enter_context(ThreadPoolExecutor(1, thread_name_prefix="plot"))
            title = f"{self.config.name} ({self.config.algorithm})"
            self.ended.callback(_end_of_plotting, thread.submit(plot_run, self.paths.metrics, self.paths.plot, title))


def _end_of_plotting(plotted: Future[None]) -> None:
    """Wait for the plot; how the run ended does not depend on it."""
    try:
        plotted.result()
    except Exception as error:
        logger.warning("the run is not plotted: %s: %s", type(error).__name__, error)


def devices_of(config: Config) -> int:
    """GPUs of a run, or its workers where there are none: each worker's own, or shared by the roles in turn."""
    sizes = [layout.world_size for layout in layouts(config).values()]
    return max(sizes) if is_colocated(config) else sum(sizes)


def process_label(group: WorkerGroup, rank: int) -> str:
    return f"{group.role.name} {rank} ({group.layout.coordinates(rank)})"
