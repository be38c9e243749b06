"""A run that is ready for its first step: workers are up and phases are compiled. `start.py` opens it.

The loops (`dagrl.run.loops`) take a session and pass its pieces on: replays, the recorder, the checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from dagrl.config import Config
from dagrl.errors import LayoutError, StopRequestedError
from dagrl.run.checkpoint_store import TrainState
from dagrl.run.checkpoints import Checkpoints, ranking_metric, require_shared
from dagrl.run.control import Commands
from dagrl.run.driver_record import DriverRecord
from dagrl.run.engine_replacement import EngineReplacement
from dagrl.run.preflight import Inputs
from dagrl.run.recorder import Recorder
from dagrl.run.replays import Replays
from dagrl.run.stop import StopSignal
from dagrl.run.train_recovery import TrainRecovery
from dagrl.runtime.worker_group import WorkerGroup

T = TypeVar("T")


@dataclass(frozen=True)
class LastStep:
    """A step after which a run stops although more are left. `then` is called before its workers end."""

    number: int
    then: Callable[[Session], None] = lambda session: None


@dataclass(frozen=True)
class Session:
    """The pieces of a run."""

    config: Config
    inputs: Inputs
    train: WorkerGroup
    generation: WorkerGroup | None
    replays: Replays
    recorder: Recorder
    checkpoints: Checkpoints
    stop: StopSignal
    last_step: LastStep | None = None
    replacement: EngineReplacement | None = None  # of generation engines that fail
    recovery: TrainRecovery | None = None  # of train workers that die
    check: Callable[[], None] = lambda: None  # raises ClusterError if Ray has ended
    record_of_driver: DriverRecord | None = None  # with `timeouts.orphan_s`

    @property
    def step(self) -> int:
        """The last finished step, counted over all stages."""
        return self.checkpoints.state.step

    def recovered(self, action: Callable[[], T]) -> T:
        """Runs a part of a step that updates the weights once, or not at all; see `TrainRecovery.run`."""
        return action() if self.recovery is None else self.recovery.run(action)

    def goes_straight_on(self, step: int) -> bool:
        """Whether nothing has to happen between `step` and the next one."""
        last = self.last_step is not None and step == self.last_step.number
        return not (last or self.stop.requested or self.record_of_driver is not None or self.checkpoints.due(step))

    def finish_step(
        self,
        stage: str,
        position: int,
        total: int,
        metrics: dict[str, float],
        state: TrainState,
        begin_next: Callable[[], None] = lambda: None,
    ) -> None:
        """Records a finished step and saves it if it is due. Leaves the loop after `last_step` or if a stop is requested.

        Calls `begin_next` before it records the step, unless something has to happen between this step and the next.
        """
        if self.goes_straight_on(state.step):
            begin_next()
        saved = self.checkpoints.due(state.step) or self.record_of_driver is not None
        if saved and self.recorder.rollouts is not None:  # a resumed run does not take the step again
            self.recorder.rollouts.flush()
        self.recorder.step(stage, state.step, position, total, metrics)
        if self.record_of_driver is not None:
            self.record_of_driver.write(state, self.checkpoints.parts, self.replays.scheduler.next_replays())
        self.recovered(partial(self.checkpoints.finish_step, state))
        self.stop.check()
        self.check()
        if self.last_step is not None and state.step == self.last_step.number:
            self.last_step.then(self)
            raise StopRequestedError(f"stopped after step {state.step}")

    def record_initial_validation(self, stage: str, metrics: dict[str, float]) -> None:
        """Records a validation that precedes the first step of a stage."""
        if not metrics:  # a stop request ended it
            return
        self.recorder.record.log(self.step, stage, metrics)
        ranking_metric(self.config, stage, metrics)

    @property
    def commands(self) -> Commands:
        """What `dagrl scale` and `dagrl status` can ask of the driver."""
        return {"scale": self._scale, "status": self._status}

    def _scale(self, arguments: Mapping[str, Any]) -> str:
        if self.replacement is None:
            raise LayoutError(
                "only generation engines with GPUs of their own can be scaled, and this run has none (SFT, or "
                "policy.generation.colocated.enabled)"
            )
        return self.replacement.resizing.scale(int(arguments["engines"]), float(arguments["timeout_s"]))

    def _status(self, arguments: Mapping[str, Any]) -> str:
        groups = self.replays.scheduler.groups.values()
        workers = ", ".join(f"{len(group.actors)} {group.role.name} ({group.layout.describe()})" for group in groups)
        return f"{self.config.name}: {self.step} steps done; workers: {workers}; driver: {os.getpid()}"

    def finish(self) -> None:
        """Saves the last checkpoint, and exports the policy for Hugging Face (`checkpointing.export_hf`)."""
        config, directory = self.config, self.recorder.paths.final_model
        if config.checkpointing.enabled:
            self.recovered(self.checkpoints.save_last)
        if config.checkpointing.export_hf:
            self.recorder.progress.stage("Writing the final policy", "export")
            self.replays.hold("train", keep_generation_weights=True)
            self.train.call("export_hf", str(directory), deadline=config.timeouts.checkpoint)
            require_shared(directory / "config.json")
            self.inputs.tokenizer.save_pretrained(directory)
        if self.record_of_driver is not None:
            self.record_of_driver.clear()
