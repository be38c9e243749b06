"""Replaces train workers that die during a run. Their state comes from their data-parallel peers.

    metrics = recovery.run(partial(learn, batch))    # a part of a step that updates the weights once, or not at all

What was under way is executed again from its start, and nothing is read from a checkpoint. That is right while no living
worker has begun to update its weights. An update follows the last collective of its replay, in which every worker takes
part: a worker that has not begun one has the weights from before the replay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from dagrl.config import Config
from dagrl.config.roles import CRITIC, GENERATION, TRAIN
from dagrl.config.settings import is_colocated
from dagrl.errors import DeadlineError, WorkerError
from dagrl.run.engine_replacement import EngineReplacement
from dagrl.run.fleet import Fleet
from dagrl.run.replays import Replays
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.revive import idle_ranks, revive
from dagrl.runtime.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")

METHODS = {"last_update", "copy_state", "restore_state"}
"""See `PeerRestored` in `worker_protocols.py`."""


@dataclass
class TrainRecovery:
    """See the module's docstring. `before` is called before workers lose what they hold, `replacement` connects refits."""

    config: Config
    fleet: Fleet
    group: WorkerGroup
    replays: Replays
    replacement: EngineReplacement | None
    before: Callable[[], None]

    def run(self, action: Callable[[], T]) -> T:
        """Returns what `action` returns; calls it again after train workers that died were replaced.

        Raises the WorkerError of a failure after which the run has to restart from a checkpoint.
        """
        while True:
            begun = self.replays.scheduler.next_replays()
            try:
                return action()
            except WorkerError as error:
                self._recover(error, begun)

    def _recover(self, error: WorkerError, begun: Mapping[str, int]) -> None:
        begin = time.monotonic()
        gone = {failure.rank for failure in error.failures if failure.role == TRAIN and failure.kind != "raised"}
        if not self.fleet.restarts or not gone or any(failure.role != TRAIN for failure in error.failures):
            raise error
        reason = self._obstacle()
        living = [] if reason else self._living(gone)
        sources = state_sources(self.group.layout, living)
        if not reason and len(sources) < self.group.layout.world_size:
            reason = "some of the model was on workers without a peer that lives"
        if not reason and self._updated(living, begun):
            reason = "its step had begun to update the weights"
        if reason:
            logger.info("train workers %s died, and the state of their peers is not used: %s", sorted(gone), reason)
            raise error
        self.fleet.restarts -= 1
        logger.warning(
            "replacing train workers %s with the state of their peers (%d restarts left) after: %s",
            sorted(gone),
            self.fleet.restarts,
            error,
        )
        self._replace(set(range(self.group.layout.world_size)) - set(living), sources)
        logger.info("the train workers are whole again after %.1f s; no step is lost", time.monotonic() - begin)

    def _obstacle(self) -> str:
        """Why the peers' state would not do; empty if it may."""
        if is_colocated(self.config):
            return "generation shares their GPUs"
        if self.config.policy.megatron_cfg.optimizer.use_distributed_optimizer:
            return "each alone has its part of the optimizer's state (use_distributed_optimizer)"
        if CRITIC in self.replays.scheduler.groups:
            return "the critic may have learned from the step"
        if not METHODS <= set(self.group.role.methods):
            return f"the worker class lacks {', '.join(sorted(METHODS - set(self.group.role.methods)))}"
        return ""

    def _living(self, gone: set[int]) -> list[int]:
        """The ranks whose workers live and have left what they ran."""
        others = [rank for rank in range(len(self.group.actors)) if rank not in gone]
        self.group.abort(others)
        return [rank for rank in idle_ranks(self.group, self.config.timeouts.grace_s, others) if rank not in gone]

    def _updated(self, living: Sequence[int], begun: Mapping[str, int]) -> bool:
        """Whether a worker began an update in one of the replays since `begun`."""
        dead = set(range(len(self.group.actors))) - set(living)
        found = self.group.call("last_update", deadline=self.config.timeouts.replay, without=dead)
        return any(update is not None and update[1] >= begun.get(update[0], 0) for update in found)

    def _replace(self, lost: set[int], sources: Mapping[int, int]) -> None:
        limits, scheduler = self.config.timeouts, self.replays.scheduler
        generation = scheduler.groups.get(GENERATION)
        refits = {} if generation is None else {GENERATION: range(len(generation.actors))}  # compiled by `connect`
        states = self._copies(set(sources.values()))
        self.before()
        scheduler.recover([TRAIN], {TRAIN: lost, **refits})
        revival = revive(self.group, rest_s=limits.teardown_s)
        logger.info("%s: %s", TRAIN, revival)
        refs = [actor.restore_state.remote(states[sources[rank]]) for rank, actor in enumerate(self.group.actors)]
        self.group.wait(refs, limits.checkpoint, "restore_state")
        scheduler.recover([TRAIN], refits)
        phases = self.replays.phases.values()
        scheduler.warmup(only=dict.fromkeys(phase.name for phase in phases if set(phase.roles) == {TRAIN}))
        if self.replacement is not None:
            self.replacement.outdated = True
        self.fleet.settle()

    def _copies(self, sources: set[int]) -> dict[int, Any]:
        """Returns references to the states of these ranks, in Ray's object store: the processes may end."""
        deadline = self.config.timeouts.checkpoint
        refs = {rank: self.group.actors[rank].copy_state.remote() for rank in sorted(sources)}
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=deadline.seconds, fetch_local=False)
        if len(ready) < len(refs):
            raise DeadlineError(f"train workers did not copy their state: {deadline.missed}")
        return refs


def state_sources(layout: ParallelLayout, living: Sequence[int]) -> dict[int, int]:
    """Returns a living rank with the same part of the model for each rank that has one.

    Ranks at the same place in the pipeline, the tensor-parallel group and the experts hold the same tensors, whatever their
    data- and context-parallel places.
    """

    def part(rank: int) -> tuple[int, ...]:
        where = layout.coordinates(rank)
        return where.pp, where.tp, where.ep, where.etp

    first = {part(rank): rank for rank in sorted(living, reverse=True)}
    return {rank: first[part(rank)] for rank in range(layout.world_size) if part(rank) in first}
