"""A run that is ready for its first step: workers are up and phases are compiled. `start.py` opens it.

The loops (`dagrl.run.loops`) take a session and pass its pieces on: replays, the recorder, the checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dagrl.config import Config
from dagrl.config.plan import RunPlan
from dagrl.errors import StopRequestedError
from dagrl.run.checkpoint_store import TrainState
from dagrl.run.checkpoints import Checkpoints, ranking_metric, require_shared
from dagrl.run.engine_replacement import EngineReplacement
from dagrl.run.preflight import Inputs
from dagrl.run.recorder import Recorder
from dagrl.run.replays import Replays
from dagrl.run.stop import StopSignal
from dagrl.runtime.worker_group import WorkerGroup


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

    @property
    def step(self) -> int:
        """The last finished step, counted over all stages."""
        return self.checkpoints.state.step

    def goes_straight_on(self, step: int) -> bool:
        """Whether nothing has to happen between `step` and the next one."""
        last = self.last_step is not None and step == self.last_step.number
        return not (last or self.stop.requested or self.checkpoints.due(step))

    def finish_step(self, stage: str, position: int, total: int, metrics: dict[str, float], state: TrainState) -> None:
        """Records a finished step and saves it if it is due. Leaves the loop after `last_step` or if a stop is requested."""
        if self.checkpoints.due(state.step) and self.recorder.rollouts is not None:
            self.recorder.rollouts.flush()  # a resumed run does not take the step again
        self.recorder.step(stage, state.step, position, total, metrics)
        self.checkpoints.finish_step(state)
        self.stop.check()
        self.after_step()
        if self.last_step is not None and state.step == self.last_step.number:
            self.last_step.then(self)
            raise StopRequestedError(f"stopped after step {state.step}")

    def record_initial_validation(self, stage: str, metrics: dict[str, float]) -> None:
        """Records a validation that precedes the first step of a stage."""
        if not metrics:  # a stop request ended it
            return
        self.recorder.record.log(self.step, stage, metrics)
        ranking_metric(self.config, stage, metrics)

    def finish(self) -> None:
        """Saves the last checkpoint, and exports the policy for Hugging Face (`checkpointing.export_hf`)."""
        config, directory = self.config, self.recorder.paths.final_model
        if config.checkpointing.enabled:
            self.checkpoints.save_last()
        if config.checkpointing.export_hf:
            self.recorder.progress.stage("Writing the final policy", "export")
            self.replays.hold("train", keep_generation_weights=True)
            self.train.call("export_hf", str(directory), deadline=config.timeouts.checkpoint)
            require_shared(directory / "config.json")
            self.inputs.tokenizer.save_pretrained(directory)
