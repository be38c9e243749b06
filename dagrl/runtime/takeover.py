"""Takes over the workers of a driver that has died, as far as they live and are at rest.

lease.keep.remote([keep(group) for group in groups])     # the driver, whenever its groups have changed
group, lost = take_over(kept, rest_s)                    # the next driver, for each of them
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle

from dagrl.runtime.actors import HEALTH, ActorStarter, WorkerLocation
from dagrl.runtime.executors.loop import end_loops
from dagrl.runtime.executors.node import report
from dagrl.runtime.worker_group import WorkerGroup

ANSWER_S = 5.0
"""How long a worker may take to say what it runs before it counts as dead."""

END_LOOPS_S = 5.0
"""How long the loops of a dead driver's graphs may take to end on an idle worker."""

POLL_S = 0.1


@dataclass(frozen=True)
class KeptGroup:
    """A worker group that another driver can take over. It can be sent to actors."""

    starter: ActorStarter
    actors: tuple[ActorHandle, ...]
    locations: tuple[WorkerLocation, ...]
    spares: list[tuple[ActorHandle, str]]

    @property
    def all_actors(self) -> list[ActorHandle]:
        return [*self.actors, *(actor for actor, _ in self.spares)]


def keep(group: WorkerGroup) -> KeptGroup:
    """Describes a group that `WorkerGroup.create` made."""
    return KeptGroup(replace(group.starter), group.actors, group.locations, group.starter.pool.waiting)


def take_over(kept: KeptGroup, rest_s: float) -> tuple[WorkerGroup, list[int]]:
    """Returns the group, whose workers have no graphs, and the ranks whose workers are lost.

    Those are dead or not idle within `rest_s`. Their places are filled by spares or new processes, which are not set up.
    """
    starter, actors = kept.starter, list(kept.actors)
    starter.pool.adopt(kept.spares)
    rest = _at_rest(actors, rest_s)
    lost = [rank for rank in range(len(actors)) if rank not in rest]
    for rank in lost:
        ray.kill(actors[rank])
        actors[rank] = starter.take_over(rank, kept.locations[rank]) or starter.start(rank)
    return WorkerGroup.started(starter.traced, actors, starter), lost


def _at_rest(actors: Sequence[ActorHandle], rest_s: float) -> set[int]:
    """Returns the ranks of the actors that are idle within `rest_s`, once their graphs have ended.

    What the dead driver has sent runs to its end first: a worker that left early would keep its peers waiting.
    """
    until = time.monotonic() + rest_s
    while True:
        found = _answers(actors, ANSWER_S, report)
        idle = {rank for rank, one in found.items() if not one.what}
        if len(idle) == len(found) or time.monotonic() >= until:
            break
        time.sleep(POLL_S)
    ended = _answers(actors, ANSWER_S + END_LOOPS_S, end_loops, END_LOOPS_S)
    return {rank for rank in idle if ended.get(rank) == []}


def _answers(actors: Sequence[ActorHandle], timeout_s: float, function: Any, *args: object) -> dict[int, Any]:
    """Returns what `function(worker, *args)` returned in the actors that answered, by rank."""
    calls = [actor.__ray_call__.options(concurrency_group=HEALTH) for actor in actors]
    refs = {call.remote(function, *args): rank for rank, call in enumerate(calls)}
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    found = {}
    for ref in ready:
        with suppress(ray.exceptions.RayError):  # it is dead, or was not ready yet
            found[refs[ref]] = ray.get(ref)
    return found
