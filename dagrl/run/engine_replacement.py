"""Replaces generation engines that fail during a run, while training and the other engines go on.

    lost = replacement.replace(error)      # spares or new processes, and the graphs of their shards alone
    replacement.connect()                  # once training rests: a plan and a channel for the next refit, which fills them

The train workers hold the weights, so nothing is read from a checkpoint, and no step is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dagrl.config import Config
from dagrl.errors import WorkerError, WorkerFailure
from dagrl.run.fleet import Fleet
from dagrl.run.replays import Replays
from dagrl.runtime.revive import idle_ranks, revive_shards
from dagrl.runtime.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

ROLE = "generation"


@dataclass
class EngineReplacement:
    """See the module's docstring. `plan` connects the groups for refits."""

    config: Config
    fleet: Fleet
    group: WorkerGroup
    replays: Replays
    plan: Callable[[], object]
    unconnected: bool = field(default=False, init=False)  # engines were replaced since the groups were connected

    def replace(self, error: WorkerError) -> set[int] | None:
        """Replaces the engines that failed; returns their shards. None if the run has to restart."""
        if not self.fleet.restarts or not self._replaceable(error.failures):
            return None
        begin, limits = time.monotonic(), self.config.timeouts
        failed = {failure.rank for failure in error.failures if failure.role == ROLE}
        lost = failed | (set(range(len(self.group.actors))) - set(idle_ranks(self.group, limits.grace_s)))
        shards = {self.group.layout.coordinates(rank).dp for rank in lost}
        self.fleet.restarts -= 1
        logger.warning(
            "replacing the engines of generation shards %s (%d restarts left), training goes on, after: %s",
            sorted(shards),
            self.fleet.restarts,
            error,
        )
        revival = revive_shards(self.group, lost, rest_s=limits.teardown_s, start_s=limits.start_s)
        self.replays.scheduler.recover([ROLE])
        self.unconnected = True
        self.fleet.settle()
        logger.info("%s; replaced after %.1f s", revival, time.monotonic() - begin)
        return shards

    def connect(self) -> None:
        """Connects new engines for refits, if there are any. Waits until the workers have ended what they run."""
        if not self.unconnected:
            return
        scheduler, refit = self.replays.scheduler, self.replays.phases["refit"]
        with scheduler.at_rest(self.config.timeouts.replay_s):
            self.plan()
            scheduler.warmup(only=[refit.name])
        self.unconnected = False

    def _replaceable(self, failures: tuple[WorkerFailure, ...]) -> bool:
        """Whether engines can be replaced after these failures, while training goes on.

        Only generation workers may have failed. In a refit train workers raise too; there, one of generation must have died.
        Agents would see their requests begin again, and without updates in flight sequences must not change their version.
        """
        settings, phases = self.config.grpo.async_grpo, self.replays.phases
        if self.config.environment.agent is not None or (settings.enabled and not settings.in_flight_weight_updates):
            return False
        gone = [failure for failure in failures if failure.kind != "raised"]
        if any(failure.phase == phases["refit"].name for failure in failures):
            return bool(gone) and all(failure.role == ROLE for failure in gone)
        return bool(failures) and all((one.role, one.phase) == (ROLE, phases["generate"].name) for one in failures)
