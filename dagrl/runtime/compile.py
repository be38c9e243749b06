"""Compiles a traced phase into graphs, one for each shard."""

import functools
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ray.actor import ActorHandle
from ray.exceptions import RayError

from dagrl.runtime.edges.memory import EdgeClosedError
from dagrl.runtime.edges.packet import Packet
from dagrl.runtime.executors.base import Actors, Executable, Executor, GraphLimits, Nodes, accelerated
from dagrl.runtime.graph import PhaseGraph, WorkerRef
from dagrl.runtime.phase import replicas_per_graph
from dagrl.runtime.tickets import Counters, GraphWorkers
from dagrl.runtime.worker_group import Groups

Ranks = Mapping[str, Sequence[int]]  # the ranks of each role, in a graph's order

Engine = Literal["dagrl", "ray"]  # the engine of compiled graphs: dagrl's loops and edges, or Ray's Compiled Graphs


@dataclass(eq=False)
class Compiled:
    """A live graph of a phase: its executable, its shard, its workers, and how many replays it has not ended."""

    executable: Executable
    shard: int
    workers: tuple[GraphWorkers, ...]
    actors: tuple[ActorHandle, ...]
    under_way: int = field(default=0, init=False)

    def submit(self, packet: Packet) -> Any:
        """Starts a replay. Returns what `fetch` takes, or the error of a graph that a worker's death ended meanwhile."""
        self.under_way += 1
        try:
            return self.executable.submit(packet)
        except (RayError, EdgeClosedError) as error:
            return error

    def fetch(self, submitted: Any, timeout_s: float) -> Packet:
        """Calls `Executable.fetch`. Raises the error of a replay that could not be sent."""
        if isinstance(submitted, RayError | EdgeClosedError):
            raise submitted
        packet = self.executable.fetch(submitted, timeout_s)
        self.under_way -= 1
        return packet

    @property
    def reusable(self) -> bool:
        """Whether it has ended all of its replays and can start another one."""
        return self.under_way == 0 and self.executable.reusable

    def runs_on(self, groups: Groups) -> bool:
        """Returns whether its workers are still those of `groups`, and in service."""
        if not _in_service({workers.role: workers.ranks for workers in self.workers}, groups):
            return False
        actors = [groups[workers.role].actors[rank] for workers in self.workers for rank in workers.ranks]
        return [actor._actor_id for actor in self.actors] == [actor._actor_id for actor in actors]


def compile_phase(
    executor: Executor, graph: PhaseGraph, groups: Groups, counters: Counters, limits: GraphLimits, without: Collection[int]
) -> list[Compiled]:
    """Compiles the shards of a phase, except those in `without` or out of service: all graphs, or none and an error."""
    graphs: list[Compiled] = []
    with ExitStack() as undo:
        for shard, ranks in enumerate(_ranks_of_shards(graph, groups)):
            if shard in without or not _in_service(ranks, groups):
                continue
            actors = {role: [groups[role].actors[rank] for rank in some] for role, some in ranks.items()}
            bound = replace(graph, aliases=_aliases(actors))
            nodes = {role: [groups[role].locations[rank].node for rank in some] for role, some in ranks.items()}
            executable = executor(bound, actors, nodes, limits)
            undo.callback(executable.teardown, limits.teardown_s)
            all_actors = tuple(actor for some in actors.values() for actor in some)
            graphs.append(Compiled(executable, shard, _graph_workers(bound, ranks, counters), all_actors))
        undo.pop_all()
    return graphs


def executor_of(name: str, engine: Engine = "dagrl") -> Executor:
    """Returns the executor of that name. Graphs with accelerator edges run on Ray's engine, which alone has them."""
    if name == "eager":
        from dagrl.runtime.executors.eager import EagerGraph, Sender

        return functools.partial(EagerGraph, sender=Sender())

    def compiled(graph: PhaseGraph, actors: Actors, nodes: Nodes, limits: GraphLimits) -> Executable:
        from dagrl.runtime.executors.dagrl_engine import DagrlGraph
        from dagrl.runtime.executors.ray_engine import RayGraph

        made = RayGraph if engine == "ray" or accelerated(graph) else DagrlGraph
        return made(graph, actors, nodes, limits)

    return compiled


def _in_service(ranks: Ranks, groups: Groups) -> bool:
    return not any(groups[role].out_of_service.intersection(mine) for role, mine in ranks.items())


def _graph_workers(graph: PhaseGraph, ranks: Ranks, counters: Counters) -> tuple[GraphWorkers, ...]:
    on_nodes = {node.worker for node in graph.nodes}
    earlier: set[int] = set()
    workers = []
    for role, mine in ranks.items():
        here = [counters[role][rank] for rank in mine]
        used = [counter for at, counter in enumerate(here) if WorkerRef(role, at) in on_nodes and counter not in earlier]
        earlier.update(used)
        workers.append(GraphWorkers(role, tuple(mine), tuple(here), tuple(used)))
    return tuple(workers)


def _aliases(actors: Mapping[str, Sequence[ActorHandle]]) -> dict[WorkerRef, WorkerRef]:
    """Returns the workers on the actor of an earlier one, and that one."""
    first: dict[object, WorkerRef] = {}
    workers = {WorkerRef(role, at): actor for role, mine in actors.items() for at, actor in enumerate(mine)}
    first_on_actor = {worker: first.setdefault(actor._actor_id, worker) for worker, actor in workers.items()}
    return {worker: known for worker, known in first_on_actor.items() if known != worker}


def _ranks_of_shards(graph: PhaseGraph, groups: Groups) -> list[Ranks]:
    """Returns, for each shard of a graph as traced, the ranks of each role in the graph's order."""
    layouts = {role: groups[role].layout for role in graph.widths}
    replicas = replicas_per_graph({role: layout.dp for role, layout in layouts.items()})
    role = next(iter(layouts))
    return [
        {
            role: [rank for dp in range(index * count, (index + 1) * count) for rank in layouts[role].shard(dp)]
            for role, count in replicas.items()
        }
        for index in range(layouts[role].dp // replicas[role])
    ]
