"""Tickets: the order in which a worker executes replays of all its phases."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dagrl.errors import LayoutError
from dagrl.runtime.worker_group import WorkerGroup


@dataclass(frozen=True)
class GraphWorkers:
    """The workers of one role in one graph, in the graph's order: their ranks and ticket counters.

    `used`: the counters of those that the phase has nodes on, and that no earlier role of the graph uses.
    """

    role: str
    ranks: tuple[int, ...]
    counters: tuple[int, ...]
    used: tuple[int, ...]


Counters = Mapping[str, Sequence[int]]
"""The ticket counter of each rank, by role. An actor has one, also if it is in several groups."""


class Tickets:
    """The next ticket of every worker of some groups. An actor has one counter, also if it is in several groups."""

    def __init__(self) -> None:
        self.counters: Counters = {}
        self._next: list[int] = []

    def join(self, groups: Sequence[WorkerGroup]) -> None:
        """Follows `groups`: those so far, in their order, and then new ones.

        Raises LayoutError for two groups of one role, and for a new one on the actors of those so far.
        """
        roles = [group.role.name for group in groups]
        for role in roles:
            if roles.count(role) > 1:
                raise LayoutError(
                    f"{roles.count(role)} groups have the role {role!r}, by which phases find theirs; give each a name of "
                    "its own: WorkerGroup.from_actors(..., role=...)"
                )
        numbers: dict[object, int] = {}  # by actor
        counters = {
            group.role.name: tuple(numbers.setdefault(actor._actor_id, len(numbers)) for actor in group.actors)
            for group in groups
        }
        joining = {role: mine for role, mine in counters.items() if role not in self.counters}
        for role, mine in joining.items():
            if min(mine) < len(self._next):
                raise LayoutError(f"the {role} group joins a scheduler that has groups on its actors; give it all at once")
        self.counters = counters
        self._next += [0] * len({counter for mine in joining.values() for counter in mine})

    def of(self, role: str) -> list[int]:
        """Returns the next ticket of each rank."""
        return [self._next[counter] for counter in self.counters[role]]

    def together(self, roles: Iterable[str]) -> tuple[str, ...]:
        """Returns these roles and all that share actors with them, directly or through others."""
        joined = set(roles)
        while more := {
            other
            for other, counters in self.counters.items()
            if other not in joined and any(set(counters) & set(self.counters[role]) for role in joined)
        }:
            joined |= more
        return tuple(role for role in self.counters if role in joined)

    def take(self, graph_workers: Sequence[GraphWorkers]) -> dict[str, int | tuple[int, ...]]:
        """Returns the tickets of a graph's workers; advances those of the workers that the phase uses."""
        mine: dict[str, int | tuple[int, ...]] = {}
        tickets = self._next
        for role_workers in graph_workers:
            first, *others = [tickets[counter] for counter in role_workers.counters]
            mine[role_workers.role] = first if others.count(first) == len(others) else (first, *others)
        for role_workers in graph_workers:  # after all roles have read theirs: they may share actors
            for counter in role_workers.used:
                tickets[counter] += 1
        return mine
