"""Adds the planned phases to a scheduler, and warms up those of the groups that have started while others start.

Where both share a GPU and may exchange memory (`policy.generation.colocated.exchange: auto`), the train worker's memory is
limited meanwhile: a tenth of the GPU stays free next to what generation is planned to take. A warm-up that needs more is
repeated once generation has started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagrl.config import Config
from dagrl.config.plan import RunPlan
from dagrl.config.roles import TRAIN
from dagrl.errors import PhaseError
from dagrl.run.colocated import AMPLE
from dagrl.run.memory_fit import engine_bytes
from dagrl.run.model import checkpoint_bytes
from dagrl.run.plans import PhasePlan
from dagrl.run.preflight import Inputs
from dagrl.run.stop import StopSignal
from dagrl.runtime.phase import Phase
from dagrl.runtime.schedule import Scheduler
from dagrl.runtime.worker_group import WorkerGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

LIMIT = "limit_memory"


@dataclass(frozen=True)
class EarlyWarmUp:
    """Compiles and warms up the phases of groups that have started, while others start (`Fleet.groups`).

    `done` has the names of the phases that are warmed up.
    """

    config: Config
    plan: RunPlan
    inputs: Inputs
    plans: Sequence[PhasePlan]
    phases: Mapping[str, Phase]
    scheduler: Scheduler
    stop: StopSignal
    done: set[str] = field(default_factory=set)

    def __call__(self, groups: Sequence[WorkerGroup], check: Callable[[], None]) -> None:
        """Calls `check`, which may raise to give up, before each phase."""
        train = next((group for group in groups if group.role.name == TRAIN), None)
        limited = train is not None and self.plan.start.early == "limited"
        if train is not None and limited and LIMIT not in train.role.methods:
            return
        with self.stop.at_once():
            self.scheduler.join(groups)
            mine = [plan for plan in self.plans if self.scheduler.groups.keys() >= set(self.phases[plan.name].roles)]
            add_phases(self.scheduler, self.phases, mine, self.inputs.tokenizer)
            self.scheduler.compile(complete=False)
            if train is not None and self.plan.reference == TRAIN:
                train.call("snapshot_reference")  # for the warm-up only
            if train is not None and limited:
                self._warm_up_limited(train, check)
            else:
                self._warm_up(check)

    def _warm_up(self, check: Callable[[], None]) -> None:
        seconds = self.scheduler.warmup(before=lambda phase: check())
        log_warm_up("warm-up while others start", seconds)
        self.done.update(seconds)

    def _warm_up_limited(self, train: WorkerGroup, check: Callable[[], None]) -> None:
        memory = [found.total for found in train.call("device_memory") if found is not None]
        planned = engine_bytes(self.config, self.inputs.hf_config, checkpoint_bytes(self.config.policy))
        train.call(LIMIT, max(0.0, 1 - AMPLE - planned / min(memory)) if memory else 0.0)
        try:
            self._warm_up(check)
        except PhaseError as error:
            if error.breaks or not any(train.call(LIMIT, None)):
                raise
            text = "training exceeded its memory while generation starts, and is warmed up again after that: %s"
            logger.info(text, error.failures[0].message)
        else:
            train.call(LIMIT, None)


def log_warm_up(name: str, seconds: Mapping[str, float]) -> None:
    """Logs how long the warm-up of each phase took."""
    logger.info("%s: %s", name, ", ".join(f"{phase} {spent:.1f} s" for phase, spent in seconds.items()))


def add_phases(
    scheduler: Scheduler, phases: Mapping[str, Phase], plans: Sequence[PhasePlan], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Tells the scheduler the shapes of the planned phases."""
    for plan in plans:
        scheduler.add(
            phases[plan.name],
            buckets=plan.buckets,
            scalars={"global_valid_tokens": 1.0, "global_valid_sequences": 1.0, **plan.scalars},
            token_ids=len(tokenizer),
            warmup_value=plan.value,
            result_bytes=plan.result_bytes,
        )
