"""The generation engines of a run: quanta are replays of `phases.generate`, the rest are calls of the worker group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dagrl.errors import WorkerError
from dagrl.rl.generation import FinishedRequest, Generated, pack_generated
from dagrl.rl.rollout.engines import GenerationEngines, Quantum, QuantumResult
from dagrl.run.engine_replacement import EngineReplacement
from dagrl.run.replays import Replays
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.replay import Replay
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker_group import WorkerGroup

PHASE = "generate"


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


class WorkerEngines(GenerationEngines):
    """The engines of a generation group. `deadline` limits each plain call of its workers.

    Without a `replacement`, no engine is replaced.
    """

    def __init__(
        self, group: WorkerGroup, replays: Replays, deadline: Deadline, replacement: EngineReplacement | None = None
    ) -> None:
        self._group, self._replays, self._deadline = group, replays, deadline
        self._replacement = replacement

    @property
    def shards(self) -> int:
        return self._group.layout.dp

    def submit(self, requests: Batch, rows: Sequence[npt.NDArray[np.intp]]) -> ReplayedQuantum:
        replay = self._replays.submit(PHASE, requests, rows=rows)
        return ReplayedQuantum(self._replays, replay, self._group.layout.dp)

    def abort(self, requests: Sequence[int]) -> None:
        self._group.call("abort_requests", requests, deadline=self._deadline)

    def unfinished(self) -> Mapping[int, FinishedRequest]:
        """Returns the first rank of each shard reports; its other ranks run the same requests."""
        layout = self._group.layout
        ranks = self._group.call("unfinished_requests", deadline=self._deadline)
        reports = [ranks[layout.shard(dp)[0]] for dp in range(layout.dp)]
        return {request.request_id: request for report in reports if report is not None for request in report}

    def exclude_wait(self) -> None:
        self._replays.exclude_wait(self._group.role.name)

    def replace(self, error: WorkerError) -> set[int] | None:
        return None if self._replacement is None else self._replacement.replace(error)

    @property
    def ready(self) -> bool:
        return self._replacement is None or self._replacement.ready

    def refill(self, version: int) -> None:
        self.connect()
        self._replays.replay("refit", version)

    def connect(self) -> None:
        if self._replacement is not None:
            self._replacement.connect()
