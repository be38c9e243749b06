"""Adds the planned phases to a scheduler, and warms up those of the groups that have started while others start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagrl.config.plan import RunPlan
from dagrl.config.roles import TRAIN
from dagrl.run.plans import PhasePlan
from dagrl.run.preflight import Inputs
from dagrl.run.stop import StopSignal
from dagrl.runtime.phase import Phase
from dagrl.runtime.schedule import Scheduler
from dagrl.runtime.worker_group import WorkerGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EarlyWarmUp:
    """Compiles and warms up the phases of groups that have started, while others start (`Fleet.groups`).

    `done` has the names of the phases that are warmed up.
    """

    plan: RunPlan
    inputs: Inputs
    plans: Sequence[PhasePlan]
    phases: Mapping[str, Phase]
    scheduler: Scheduler
    stop: StopSignal
    done: set[str] = field(default_factory=set)

    def __call__(self, groups: Sequence[WorkerGroup], check: Callable[[], None]) -> None:
        """Calls `check`, which may raise to give up, before each phase."""
        with self.stop.at_once():
            self.scheduler.join(groups)
            ready = [plan for plan in self.plans if self.scheduler.groups.keys() >= set(self.phases[plan.name].roles)]
            add_phases(self.scheduler, self.phases, ready, self.inputs.tokenizer)
            self.scheduler.compile(complete=False)
            if self.plan.reference == TRAIN and TRAIN in self.scheduler.groups:
                self.scheduler.groups[TRAIN].call("snapshot_reference")  # for the warm-up only
            seconds = self.scheduler.warmup(before=lambda phase: check())
            log_warm_up("warm-up while others start", seconds)
            self.done.update(seconds)


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
