"""For graphs over several hosts: one edge per host, and trees of edges for many hosts.

A value that several workers of another host read crosses once, to a *relay* on the first of them, which passes it to the
others through shared memory. With more than `FAN_OUT` hosts, relays feed relays, so that no process sends to more. Results
that the driver lists are collected on each host in the same way (`gather.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dagrl.runtime.graph import InputRef, Node, NodeRef, PhaseGraph, Source, WorkerRef

FAN_OUT = 8
"""The largest number of other hosts that one process sends to."""

RELAY = "relay"
"""Kind of a node that passes on what it reads."""


@dataclass(frozen=True)
class Hosts:
    """The host of each worker of a graph, and the driver's host."""

    of: Mapping[WorkerRef, str]
    driver: str

    @property
    def several(self) -> bool:
        """Whether any worker is not on the driver's host."""
        return any(host != self.driver for host in self.of.values())


def with_relays(graph: PhaseGraph, hosts: Hosts, direct: Collection[int] = ()) -> PhaseGraph:
    """Adds relays for values that several workers of another host read, except those of the nodes `direct`."""
    if not hosts.several:
        return graph
    readers = _readers(graph)
    nodes: list[Node] = []
    places: dict[int, int] = {}  # positions of the graph's nodes in `nodes`
    relays: dict[Source, dict[str, int]] = {None: _add_relays(nodes, None, readers[None], hosts.driver, hosts)}
    for node in graph.nodes:
        host = hosts.of[node.worker]
        place = len(nodes)
        nodes.append(node.remapped(place, functools.partial(_through, host=host, places=places, relays=relays)))
        places[node.number] = place
        if node.number in readers and node.number not in direct:
            relays[node.number] = _add_relays(nodes, place, readers[node.number], host, hosts)
    return dataclasses.replace(graph, nodes=tuple(nodes), outputs=tuple(places[number] for number in graph.outputs))


def by_host(workers: Sequence[WorkerRef], hosts: Hosts) -> dict[str, list[int]]:
    """Returns the positions of the workers on each host, hosts in the order of their first workers."""
    positions: dict[str, list[int]] = {}
    for position, worker in enumerate(workers):
        positions.setdefault(hosts.of[worker], []).append(position)
    return positions


def _readers(graph: PhaseGraph) -> dict[Source, list[WorkerRef]]:
    """Returns the workers that read each value, each once."""
    readers: dict[Source, dict[WorkerRef, None]] = {}
    for node in graph.nodes:
        for source in node.sources:
            readers.setdefault(source, {})[node.worker] = None
    return {source: list(workers) for source, workers in readers.items()}


def _add_relays(nodes: list[Node], place: Source, readers: Sequence[WorkerRef], home: str, hosts: Hosts) -> dict[str, int]:
    """Appends the relays of one value, which node `place` produces. Returns the relay of each host."""
    abroad = {host: [readers[at] for at in mine] for host, mine in by_host(readers, hosts).items() if host != home}
    if len(abroad) <= FAN_OUT:
        abroad = {host: mine for host, mine in abroad.items() if len(mine) > 1}
    relays: dict[str, int] = {}
    order: list[int] = []
    for host, mine in abroad.items():
        above = len(order) // FAN_OUT - 1  # the relay that this one reads; the first ones read the value itself
        source: Source = place if above < 0 else order[above]
        relays[host] = len(nodes)
        order.append(len(nodes))
        nodes.append(Node(len(nodes), mine[0], "", RELAY, (InputRef() if source is None else NodeRef(source),)))
    return relays


def _through(source: Source, host: str, places: Mapping[int, int], relays: Mapping[Source, Mapping[str, int]]) -> Source:
    """Returns where a node on `host` reads a value: from the host's relay if there is one."""
    relay = relays.get(source, {}).get(host)
    return relay if relay is not None or source is None else places[source]
