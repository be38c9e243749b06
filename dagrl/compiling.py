"""From a traced phase to the graphs that are replayed: which shards share one, and which workers each runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from dagrl.errors import LayoutError
from dagrl.executors.base import Executable, Executor, Limits, accelerated
from dagrl.executors.shards import side_by_side
from dagrl.graph import PhaseGraph, WorkerRef
from dagrl.phase import Phase, replicas_per_graph
from dagrl.worker_group import WorkerGroup

Groups = Mapping[str, WorkerGroup]
Ranks = Mapping[str, Sequence[int]]
"""The ranks of each role, in a graph's order."""


@dataclass(frozen=True)
class Seats:
    """The workers of one role in one graph: their ranks in the graph's order, and those that the phase has nodes on."""

    role: str
    ranks: tuple[int, ...]
    used: tuple[int, ...]


@dataclass(frozen=True)
class Compiled:
    """A graph of a phase that is ready to be replayed: the shards that are side by side in it, and its workers."""

    executable: Executable
    shards: tuple[int, ...]
    seats: tuple[Seats, ...]


def check_groups_apart(groups: Sequence[WorkerGroup]) -> None:
    """Raise LayoutError for two groups of one role, and for actors in two groups: a worker has one order of turns."""
    roles = [group.role.name for group in groups]
    for role in roles:
        if roles.count(role) > 1:
            raise LayoutError(
                f"{roles.count(role)} groups have the role {role!r}, by which phases find theirs; give each a name of its "
                "own: WorkerGroup.from_actors(..., role=...)"
            )
    seen: dict[object, str] = {}
    for group in groups:
        for actor in group.actors:
            if (other := seen.setdefault(actor._actor_id, group.role.name)) != group.role.name:
                raise LayoutError(
                    f"an actor is in the groups {other!r} and {group.role.name!r}; make one group of such actors, and name "
                    "its phases' parameter after it"
                )


def compile_phase(executor: Executor, phase: Phase, graph: PhaseGraph, groups: Groups, limits: Limits) -> list[Compiled]:
    """The graphs of a phase, on the actors of its groups: all, or an error and none.

    `graph` and `limits` are those of one shard.
    """
    ranks_of = _ranks_of_shards(phase, groups)
    made: list[Compiled] = []
    with ExitStack() as undo:
        for shards in _shards_of_graphs(graph, ranks_of, groups):
            mine = [ranks_of[shard] for shard in shards]
            made.append(_compile_shards(executor, phase, graph, groups, limits, shards, mine))
            undo.callback(made[-1].executable.teardown, limits.teardown_s)
        undo.pop_all()
    return made


def executor_of(name: str) -> Executor:
    """The executor of that name; Ray's graph modules are imported only when they are used."""
    if name == "eager":
        from dagrl.executors.eager import EagerExecutor

        return EagerExecutor()
    from dagrl.executors.compiled import CompiledExecutor

    return CompiledExecutor()


def _compile_shards(
    executor: Executor,
    phase: Phase,
    graph: PhaseGraph,
    groups: Groups,
    limits: Limits,
    shards: Sequence[int],
    ranks_of: Sequence[Ranks],
) -> Compiled:
    """Some shards in one graph; `ranks_of` each."""
    splits = phase.inputs is not None
    whole = side_by_side(graph, len(shards), splits)
    limits = replace(limits, input_bytes=limits.input_bytes * (len(shards) if splits else 1))
    ranks = {role: [rank for mine in ranks_of for rank in mine[role]] for role in phase.roles}
    actors = {role: [groups[role].actors[rank] for rank in mine] for role, mine in ranks.items()}
    used = {node.worker for node in whole.nodes}
    seats = tuple(
        Seats(role, tuple(mine), tuple(rank for at, rank in enumerate(mine) if WorkerRef(role, at) in used))
        for role, mine in ranks.items()
    )
    return Compiled(executor.compile(whole, actors, limits), tuple(shards), seats)


def _shards_of_graphs(graph: PhaseGraph, ranks_of: Sequence[Ranks], groups: Groups) -> list[list[int]]:
    """Which shards go into one graph: those on the same hosts, so that no host gets rows that it does not need.

    Each has a graph of its own where its workers form a communicator for their edges.
    """
    if accelerated(graph):
        return [[shard] for shard in range(len(ranks_of))]
    together: dict[frozenset[str], list[int]] = {}
    for shard, ranks in enumerate(ranks_of):
        nodes = frozenset(groups[role].places[rank].node for role, mine in ranks.items() for rank in mine)
        together.setdefault(nodes, []).append(shard)
    return list(together.values())


def _ranks_of_shards(phase: Phase, groups: Groups) -> list[Ranks]:
    """For each shard of a phase (a graph as it was traced), the ranks of each role in the graph's order."""
    layouts = {role: groups[role].layout for role in phase.roles}
    replicas = replicas_per_graph({role: layout.dp for role, layout in layouts.items()})
    role = phase.roles[0]
    return [
        {
            role: [rank for dp in range(index * count, (index + 1) * count) for rank in layouts[role].shard(dp)]
            for role, count in replicas.items()
        }
        for index in range(layouts[role].dp // replicas[role])
    ]
