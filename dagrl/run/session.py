"""A run that is ready for its first step: workers are up and phases are compiled. `start.py` opens it.

The loops (`dagrl.run.loops`) take a session and pass its pieces on: replays, the recorder, the checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dagrl.config import Config, GrpoConfig, Json, PreferenceConfig, SftConfig
from dagrl.config.plan import RunPlan
from dagrl.config.roles import TRAIN
from dagrl.errors import StopRequestedError
from dagrl.run.checkpoint_store import TrainState
from dagrl.run.checkpoints import Checkpoints, ranking_metric, require_shared
from dagrl.run.engines import EngineReplacement
from dagrl.run.model import save_tokenizer
from dagrl.run.preflight import Inputs
from dagrl.run.recorder import Recorder
from dagrl.run.replays import Replays
from dagrl.run.resume import REFERENCE
from dagrl.run.stop import StopSignal
from dagrl.run.update_count import UpdateCount
from dagrl.runtime.worker_group import WorkerGroup


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
