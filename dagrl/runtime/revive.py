"""Makes a worker group whole after a failure: workers that can be set up again keep their processes, others are replaced."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ray

from dagrl.runtime.executors.node import DIED, NO_ANSWER
from dagrl.runtime.worker_group import WorkerGroup, first_line

logger = logging.getLogger(__name__)

POLL_S = 0.1
REPORT_S = 1.0
"""Deadline for a worker to answer before it is asked again with the others."""


@dataclass(frozen=True)
class Revival:
    """The numbers of workers of a group that kept their processes, and that are new."""

    kept: int
    started: int

    def __str__(self) -> str:
        return f"{self.kept} workers kept their process, {self.started} new ones were started"


def revive(group: WorkerGroup, lost: Collection[int] | None = None, *, rest_s: float) -> Revival:
    """Sets all workers of a group up again; none may have a graph. Afterwards they are as after `WorkerGroup.create`.

    A worker keeps its process if it is idle within `rest_s` and its `reset` returns true in that time. With `lost`, only the
    shards of these workers are made whole, and the others may run. Raises what `setup` raises, and DeadlineError if a new
    process takes longer than the group's start may.
    """
    shards = range(group.layout.dp) if lost is None else sorted({group.layout.coordinates(rank).dp for rank in lost})
    ranks = [rank for shard in shards for rank in group.layout.shard(shard)]
    if lost is None:
        group.out_of_service.clear()
    dead = [rank for rank, report in group.reports(REPORT_S, ranks).items() if report is DIED or rank in (lost or ())]
    group.start_again(dead)  # at once: their imports take the longest
    others = [rank for rank in ranks if rank not in dead]
    kept = _reset(group, idle_ranks(group, rest_s, others), rest_s)
    stuck = [rank for rank in others if rank not in kept]
    group.start_again(stuck)
    group.join_again([*dead, *stuck], ranks)
    return Revival(len(kept), len(dead) + len(stuck))


def idle_ranks(group: WorkerGroup, rest_s: float, ranks: Collection[int] | None = None) -> list[int]:
    """Returns those of `ranks` (None: all) whose workers live and run nothing, as soon as none runs, or after `rest_s`."""
    until = time.monotonic() + rest_s
    while True:
        reports = group.reports(max(0.0, until - time.monotonic()), ranks)
        alive = [rank for rank in reports if reports[rank].what not in (DIED.what, NO_ANSWER.what)]
        idle = [rank for rank in alive if not reports[rank].what]
        if idle == alive or time.monotonic() >= until:
            return idle
        time.sleep(POLL_S)


def _reset(group: WorkerGroup, ranks: list[int], rest_s: float) -> set[int]:
    """Returns the ranks whose `reset` returned true within `rest_s`."""
    if "reset" not in group.role.methods:
        return set()
    asked: dict[Any, int] = {group.actors[rank].reset.remote(): rank for rank in ranks}
    ready = ray.wait(list(asked), num_returns=len(asked), timeout=rest_s)[0] if asked else []
    return {asked[ref] for ref in ready if _returned_true(ref)}


def _returned_true(ref: Any) -> bool:
    try:
        return bool(ray.get(ref))
    except ray.exceptions.RayError as error:
        logger.info("a worker could not be reset, and its process is replaced: %s", first_line(error))
        return False
