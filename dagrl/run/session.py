"""A run that is ready for its first step: workers are up and phases are compiled. `start.py` opens it.

The loops (`dagrl.run.loops`) take a session and pass its pieces on: replays, the checkpoints, and the recorder, which keeps
metrics of each step, progress on the terminal, the workers' trace, and the final summary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from dagrl.config import Config, GrpoConfig, Json, PolicyConfig, PreferenceConfig, SftConfig
from dagrl.config.plan import RunPlan
from dagrl.config.roles import TRAIN
from dagrl.errors import RunError, StopRequestedError
from dagrl.rl.rollout.scoring import Untrained
from dagrl.run.checkpoint_store import TrainState
from dagrl.run.checkpoints import Checkpoints, ranking_metric, require_shared
from dagrl.run.engines import EngineReplacement
from dagrl.run.model import save_tokenizer
from dagrl.run.preflight import Inputs
from dagrl.run.replays import Replays
from dagrl.run.resume import REFERENCE
from dagrl.run.rollout_log import RolloutLog
from dagrl.run.stop import StopSignal
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.metrics import GRAD_NORM, MASKED_MINIBATCHES, SHARED_PREFIXES
from dagrl.telemetry.progress import Progress
from dagrl.telemetry.record import RunPaths, RunRecord
from dagrl.telemetry.timing import PhaseClock
from dagrl.telemetry.trace import TraceEvent, TraceWriter

logger = logging.getLogger(__name__)

LITTLE_SHARED = 0.05  # share of a batch's tokens
TRACE_PERIOD = 20  # steps between two collections of the workers' trace events

LIMIT_KEY = "policy.optimizer.max_skipped_steps"
NO_TOKENS = (
    "no token was in the loss: the reward returned None or failed for every sample, or grpo.overlong_filtering left none"
)

ZERO = (
    "the gradient was 0: the advantages are all zero, as the rewards of every prompt's completions are equal "
    "(reward/equal_groups), or the loss does not depend on the policy"
)

NOT_FINITE = "the gradient norm was {norm:g}: the loss overflows for these batches, or the weights are not finite"


def log_sharing(policy: PolicyConfig, share: float) -> None:
    """Logs the `share` of a batch's tokens that shared prefixes save, if they are set, and what to do if it is little."""
    if policy.sequence_packing.shared_prefix is True and share >= LITTLE_SHARED:
        logger.info("shared prefixes save %.0f %% of the tokens", 100 * share)
    elif policy.sequence_packing.shared_prefix is True:
        logger.warning(
            "policy.sequence_packing.shared_prefix is true, but saves %.1f %% of the tokens: few sequences begin like those "
            "before them, or two do not fit a row of %d tokens. Raise train_mb_tokens, or set shared_prefix=false",
            100 * share,
            policy.microbatch_tokens("train"),
        )


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


@dataclass
class UpdateCount:
    """Counts steps of this process that changed weights, in all and in the stage, and those in a row that changed none."""

    changed: int = 0
    changed_in_stage: int = 0
    unchanged: int = 0
    reason: str = ""
    stage: str = ""

    def begin(self, stage: str, steps: int) -> None:
        """Ends the stage before as `check_end` does, and begins another. `steps` of the run were taken before, also by an
        earlier process, of which some have changed weights."""
        self.check_end()
        self.stage, self.changed, self.changed_in_stage, self.unchanged = stage, steps, 0, 0

    def count(self, metrics: Mapping[str, float], limit: int) -> None:
        """Counts a finished step. Raises RunError if the last `limit` steps changed no weights."""
        if GRAD_NORM not in metrics and not metrics.get(MASKED_MINIBATCHES):
            return  # only a critic learned, or workers of another kind do not say
        norm = metrics.get(GRAD_NORM)
        if norm is not None and math.isfinite(norm) and norm > 0:
            self.changed, self.changed_in_stage, self.unchanged = self.changed + 1, self.changed_in_stage + 1, 0
            return
        self.unchanged += 1
        self.reason = NO_TOKENS if norm is None else ZERO if norm == 0 else NOT_FINITE.format(norm=norm)
        if self.unchanged >= limit:
            raise RunError(f"the last {limit} steps ({LIMIT_KEY}) changed no weights. In the last of them {self.reason}")

    def check_end(self) -> None:
        """Raises RunError if the stage has steps and none changed weights; if gradients were 0, as they may be when rewards
        are equal for a while, only if none of the run did."""
        if self.unchanged and not (self.changed if self.reason == ZERO else self.changed_in_stage):
            raise RunError(
                f"the run has learned nothing: none of its {self.unchanged} {self.stage} steps changed weights. In the last "
                f"of them {self.reason}"
            )


@dataclass(frozen=True)
class Stage:
    """The steps from `after + 1` to `last`, all by one algorithm. Steps count over all stages of a run."""

    name: str
    after: int
    last: int
    val_period: int
    val_at_start: bool

    @classmethod
    def of(cls, name: str, section: SftConfig | GrpoConfig | PreferenceConfig, after: int = 0) -> Stage:
        """Returns the stage that a section of the configuration describes, after the last step of another."""
        return cls(name, after, after + section.max_num_steps, section.val_period, section.val_at_start)

    def validates(self, step: int) -> bool:
        """Returns whether `step` ends with a validation."""
        return step == self.last or bool(self.val_period and (step - self.after) % self.val_period == 0)


@dataclass(frozen=True)
class LastStep:
    """A step after which a run stops although more are left. `then` is called before its workers end."""

    number: int
    then: Callable[[Session], None] = lambda session: None


@dataclass(frozen=True)
class Session:
    """The pieces of a run."""

    config: Config
    plan: RunPlan
    inputs: Inputs
    train: WorkerGroup
    generation: WorkerGroup | None
    replays: Replays
    recorder: Recorder
    checkpoints: Checkpoints
    stop: StopSignal
    last_step: LastStep | None = None
    replacement: EngineReplacement | None = None  # of generation engines that fail
    after_step: Callable[[], None] = lambda: None  # raises ClusterError if Ray has ended
    updates: UpdateCount = field(default_factory=UpdateCount)

    @property
    def step(self) -> int:
        """The last finished step, counted over all stages."""
        return self.checkpoints.state.step

    @property
    def reference_counter(self) -> dict[str, Json]:
        """Says in a checkpoint whether the train workers save a reference policy."""
        return {REFERENCE: self.plan.reference == TRAIN}

    def goes_straight_on(self, step: int) -> bool:
        """Returns whether nothing has to happen between `step` and the next one."""
        last = self.last_step is not None and step == self.last_step.number
        return not (last or self.stop.requested or self.checkpoints.due(step))

    def begin(self, stage: Stage) -> None:
        """Shows the stage, and how many of its steps are finished. Raises RunError if the one before changed no weights."""
        self.updates.begin(stage.name, self.step)
        position = min(self.step, stage.last) - stage.after
        self.recorder.progress.step(position, stage.last - stage.after, {}, stage=stage.name)

    def finish_step(self, stage: Stage, step: int, metrics: dict[str, float], counters: Mapping[str, Json]) -> None:
        """Records a finished step and saves it if it is due, with the loop's `counters`.

        Leaves the loop after `last_step` or if a stop is requested. Raises RunError if the last steps changed no weights.
        """
        metric = ranking_metric(self.config, stage.name, metrics)
        if self.checkpoints.due(step) and self.recorder.rollouts is not None:
            self.recorder.rollouts.flush()  # a resumed run does not take the step again
        self.recorder.step(stage.name, step, step - stage.after, stage.last - stage.after, metrics)
        if step == stage.after + 1 and not (stage.name == "sft" and self.plan.generates):
            log_sharing(self.config.policy, metrics.get(SHARED_PREFIXES, 0.0))
        self.updates.count(metrics, self.config.policy.optimizer.max_skipped_steps)
        self.checkpoints.finish_step(TrainState(step, counters, metric))
        self.stop.check()
        self.after_step()
        if self.last_step is not None and step == self.last_step.number:
            self.last_step.then(self)
            raise StopRequestedError(f"stopped after step {step}")

    def record_initial_validation(self, stage: Stage, metrics: dict[str, float]) -> None:
        """Records a validation that precedes the first step of a stage."""
        if not metrics:  # a stop request ended it
            return
        self.recorder.record.log(self.step, stage.name, metrics)
        ranking_metric(self.config, stage.name, metrics)

    def finish(self) -> None:
        """Saves the last checkpoint, and exports the policy for Hugging Face (`checkpointing.export_hf`).

        Raises RunError if no step of the last stage has changed weights.
        """
        self.updates.check_end()
        config, directory = self.config, self.recorder.paths.final_model
        if config.checkpointing.enabled:
            self.checkpoints.save_last()
        if config.checkpointing.export_hf:
            self.recorder.progress.stage("Writing the final policy", "export")
            self.replays.hold("train", keep_generation_weights=True)
            self.train.call("export_hf", str(directory), deadline=config.timeouts.checkpoint)
            require_shared(directory / "config.json")
            save_tokenizer(self.inputs.config.policy, self.inputs.tokenizer, directory)
