"""The generation engines of a run, and the replacement of those that fail while training goes on.

Quanta are replays of `phases.generate`, the rest are calls of the worker group.

    shards = replacement.replace(error)    # in the background. Other shards go on without them
    replacement.connect()                  # once training rests: their graphs, a plan and a channel for the next refit

The train workers hold the weights, so nothing is read from a checkpoint, and no step is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from dagrl.config import Config
from dagrl.config.roles import GENERATION
from dagrl.errors import ClusterError, WorkerError, WorkerFailure
from dagrl.refit import RefitReport
from dagrl.rl.generation import Generated, pack_generated
from dagrl.rl.rollout.engines import GenerationEngines, Quantum, QuantumResult, WeightUpdate
from dagrl.run.fleet import Fleet
from dagrl.run.replays import Replays
from dagrl.runtime.deadline import Deadline, in_background
from dagrl.runtime.replay import Replay
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker_group import WorkerGroup, idle_ranks, revive
from dagrl.telemetry.metrics import REFIT_BYTES, UPDATE_PAUSE

logger = logging.getLogger(__name__)

PHASE, REFIT = "generate", "refit"


@dataclass(frozen=True)
class ReplayedQuantum(Quantum):
    """A replay of `phases.generate` in flight."""

    replays: Replays
    replay: Replay
    shards: int

    def result(self) -> QuantumResult:
        """Waits for the replay and counts it in the step. Shards that are being replaced made nothing."""
        generated, counted = self.replays.collect(PHASE, self.replay)
        busy_s = counted.timing.shards_busy_s
        if len(generated) < self.shards:
            by_shard = dict(zip(self.replay.shards, zip(generated, busy_s, strict=True), strict=True))
            nothing = pack_generated([], [], 0), 0.0
            generated, busy_s = zip(*(by_shard.get(shard, nothing) for shard in range(self.shards)), strict=True)
        return QuantumResult(generated, busy_s, counted.overhead_s)

    def partial(self) -> Mapping[int, Generated]:
        return self.replay.partial()


@dataclass(frozen=True)
class ReplayedRefit(WeightUpdate):
    """A replay of `phases.refit` in flight."""

    replays: Replays
    replay: Replay

    def result(self) -> dict[str, float]:
        """Waits for the replay. Returns generation's pause and the bytes received."""
        reports = received(self.replays.collect(REFIT, self.replay, busy_s=mean_pause)[0])
        if not reports:
            return {}
        total = sum(report.bytes_received for report in reports)
        return {UPDATE_PAUSE: max(map(_pause, reports)), REFIT_BYTES: float(total)}


def mean_pause(result: object) -> float | None:
    """Returns the mean pause of the generation workers in seconds. Their senders also wait for the quanta before it."""
    pauses = [*map(_pause, received(result))]
    return sum(pauses) / len(pauses) if pauses else None


def _pause(report: RefitReport) -> float:
    """Returns a generation worker's pause in seconds, or the time of its receive if it reports none."""
    return report.pause_s or report.seconds


def received(result: object) -> list[RefitReport]:
    """Returns the generation workers' reports in the result of a refit phase, in whatever nesting."""
    if isinstance(result, RefitReport):
        return [result] if result.bytes_received else []
    return [report for part in result for report in received(part)] if isinstance(result, Iterable) else []


@dataclass
class WorkerEngines(GenerationEngines):
    """The engines of a generation group. `deadline` limits each plain call of its workers.

    Without a `replacement`, no engine is replaced.
    """

    group: WorkerGroup
    replays: Replays
    deadline: Deadline
    replacement: EngineReplacement | None = None
    burst_steps: int = 1

    @property
    def shards(self) -> int:
        return self.group.layout.dp

    def submit(self, requests: Batch, rows: Sequence[npt.NDArray[np.intp]]) -> ReplayedQuantum:
        replay = self.replays.submit(PHASE, requests, rows=rows)
        return ReplayedQuantum(self.replays, replay, self.shards)

    def abort(self, requests: Sequence[int]) -> None:
        self.group.call("abort_requests", requests, deadline=self.deadline)

    def replace(self, error: WorkerError) -> set[int] | None:
        return None if self.replacement is None else self.replacement.replace(error)

    @property
    def ready(self) -> bool:
        return self.replacement is None or self.replacement.ready

    @property
    def moves(self) -> bool:
        return self.replays.shared is not None and self.replays.shared.moves

    def update(self, version: int) -> ReplayedRefit:
        if self.replacement is not None:
            self.replacement.connect()
        return ReplayedRefit(self.replays, self.replays.submit(REFIT, version))


@dataclass
class EngineReplacement:
    """See the module's docstring. `plan` connects the groups for refits."""

    config: Config
    fleet: Fleet
    group: WorkerGroup
    replays: Replays
    plan: Callable[[], object]
    _starting: Future[None] | None = field(default=None, init=False)

    @property
    def ready(self) -> bool:
        """Whether the new engines have started."""
        return self._starting is None or self._starting.done()

    def replace(self, error: WorkerError) -> set[int] | None:
        """Starts replacing the engines that failed; returns their shards. None if the run has to restart.

        New engines start in the background, if the nodes of the dead ones live, while the others run quanta.
        """
        if not self.fleet.restarts or not self._replaceable(error.failures):
            return None
        self._started()
        failed = {failure.rank for failure in error.failures if failure.role == GENERATION}
        resting = set(idle_ranks(self.group, self.config.timeouts.grace_s))
        lost = failed | (set(range(len(self.group.actors))) - resting)
        shards = {self.group.layout.coordinates(rank).dp for rank in lost}
        nodes = {self.group.locations[rank].node for rank in lost}
        try:
            self.fleet.check_nodes(nodes)
        except ClusterError as dead:
            logger.warning("the engines of generation shards %s are not replaced: %s", sorted(shards), dead)
            return None
        self.fleet.restarts -= 1
        logger.warning(
            "replacing the engines of generation shards %s (%d restarts left), training goes on, after: %s",
            sorted(shards),
            self.fleet.restarts,
            error,
        )
        self.group.out_of_service |= {rank for shard in shards for rank in self.group.layout.shard(shard)}
        self.replays.scheduler.recover([GENERATION])
        self._starting = in_background(partial(self._revive, lost, nodes), "replace-engines")
        return shards

    def connect(self) -> None:
        """Connects new engines for refits, if there are any. Waits until they have started and all workers rest."""
        if not self.group.out_of_service:
            return
        self._started()
        scheduler, refit = self.replays.scheduler, self.replays.phases["refit"]
        with scheduler.at_rest(self.config.timeouts.replay_s):
            self.group.out_of_service.clear()
            scheduler.recover([GENERATION])
            self.plan()
            scheduler.warmup(only=[refit.name])

    def end(self) -> None:
        """Waits for engines that are starting, at the end of a session: the next one may use the group."""
        try:
            self._started()
        except Exception as error:
            logger.warning("a replaced engine did not start: %s", error)

    def _revive(self, lost: set[int], nodes: set[str]) -> None:
        begin = time.monotonic()
        with self.group.waiting(partial(self.fleet.check_nodes, nodes)):
            revival = revive(self.group, lost, rest_s=self.config.timeouts.teardown_s)
        logger.info("%s; the engines started in %.1f s", revival, time.monotonic() - begin)

    def _started(self) -> None:
        """Waits for the new engines. Raises what kept them from starting."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.result()

    def _replaceable(self, failures: tuple[WorkerFailure, ...]) -> bool:
        """Returns whether these failures are deaths of generation workers, and exceptions that follow from them.

        Workers that waited for a dead one in a collective raise. Agents would see their requests begin again, and without
        updates in flight sequences must not change their version.
        """
        settings = self.config.grpo.async_grpo
        if self.config.environment.agent is not None or (settings.enabled and not settings.in_flight_weight_updates):
            return False
        lost = [failure for failure in failures if failure.kind != "raised"]
        return bool(lost) and all((failure.role, failure.kind) == (GENERATION, "died") for failure in lost)
