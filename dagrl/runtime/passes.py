"""Rewrites a traced graph before it is compiled: edges between hosts, and outputs that are lists.

Between hosts there is one edge per host, and trees of edges for many hosts. A value that several workers of another host
read crosses once, to a *relay* on the first of them, which passes it to the others through shared memory. With more than
`FAN_OUT` hosts, relays feed relays, so that no process sends to more. Results that the driver lists are collected on each
host in the same way.

A list is assembled on the workers, in a tree, or in the driver. A tree costs one hop per level, and each level copies large
items. The driver reads the items of one host from a mailbox (`mailbox.py`) at 1 to 2 us each, or in place if they are large.
So trees are used for lists of very many small items, and between hosts: the items of another host are collected on one of
its workers and sent in one message.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dagrl.runtime.edges.packet import Header, Packet, PacketBody
from dagrl.runtime.graph import InputRef, Node, NodeRef, PhaseGraph, Source, WorkerRef

FAN_OUT = 8  # the largest number of other hosts that one process sends to
RELAY = "relay"  # kind of a node that passes on what it reads

DRIVER_PARTS = 128
"""The longest list of small items that the driver assembles itself; a hop of a tree takes as long as this many items."""

LARGE_BYTES = 4 << 20  # items are taken to be large if the phase's results may be larger than this
Items = tuple[int, ...]  # positions in a list of the items that one output of a graph holds: one item, or a list of several


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


@dataclass(frozen=True)
class Gathering:
    """A graph without the list that the driver assembles, and what of that list each of its outputs holds."""

    graph: PhaseGraph
    items: tuple[Items, ...]  # empty if the graph has the output itself

    @staticmethod
    def of(graph: PhaseGraph, result_bytes: int, hosts: Hosts | None = None) -> Gathering:
        """Removes a list that the driver assembles from `graph`, whose nodes have results of up to `result_bytes`."""
        longest = DRIVER_PARTS if result_bytes <= LARGE_BYTES else len(graph.nodes)
        leaves = _leaves(graph, graph.outputs[0])
        if not 0 < len(leaves) <= longest or len(set(leaves)) < len(leaves):  # a value that is listed twice is rare
            return Gathering(graph, ())
        nodes = list(graph.nodes)
        read = _list_items(nodes, leaves, hosts)
        return Gathering(_pruned(dataclasses.replace(graph, nodes=tuple(nodes)), list(read)), tuple(read.values()))

    @functools.cached_property
    def _one_by_one(self) -> bool:
        """Whether the graph's outputs are the items of the list, in order."""
        return self.items == tuple((place,) for place in range(len(self.items)))

    def put_together(self, header: Header, parts: Sequence[PacketBody]) -> Packet:
        """Returns the packet of the phase's output, from those of the graph's outputs without their headers."""
        if not self.items:
            return Packet(header, *parts[0])
        values, busy_s, failed = zip(*parts, strict=True)  # three times as fast as three loops; the driver waits for this
        if any(failed):
            return Packet(header, None, max(busy_s), tuple(dict.fromkeys(itertools.chain.from_iterable(failed))))
        return Packet(header, list(values) if self._one_by_one else _in_order(values, self.items), max(busy_s))


def _list_items(nodes: list[Node], leaves: Sequence[int], hosts: Hosts | None) -> dict[int, Items]:
    """Returns the nodes that the driver reads for a list, after appending nodes that collect the items of other hosts."""
    if hosts is None or not hosts.several:
        return {leaf: (place,) for place, leaf in enumerate(leaves)}
    read: dict[int, Items] = {}
    far: list[tuple[int, Items]] = []
    for host, places in by_host([nodes[leaf].worker for leaf in leaves], hosts).items():
        if host == hosts.driver:
            read |= {leaves[place]: (place,) for place in places}
        else:
            far.append((_collect(nodes, [leaves[place] for place in places]), tuple(places)))
    while len(far) > FAN_OUT:
        groups = [far[start : start + FAN_OUT] for start in range(0, len(far), FAN_OUT)]
        far = [(_collect(nodes, [one[0] for one in group]), sum((one[1] for one in group), ())) for group in groups]
    return read | dict(far)


def _collect(nodes: list[Node], parts: Sequence[int]) -> int:
    """Returns a node that lists `parts`, on the worker of the first; a single part itself."""
    if len(parts) == 1:
        return parts[0]
    nodes.append(Node(len(nodes), nodes[parts[0]].worker, "", "collect", tuple(NodeRef(part) for part in parts)))
    return len(nodes) - 1


def _leaves(graph: PhaseGraph, number: int) -> list[int]:
    """Returns the nodes whose values are the items of a list that the graph makes; none for any other node."""
    node = graph.nodes[number]
    if node.kind != "collect":
        return []
    return [leaf for upstream in node.upstream for leaf in (_leaves(graph, upstream) or [upstream])]


def _pruned(graph: PhaseGraph, outputs: Sequence[int]) -> PhaseGraph:
    """Returns the graph with these outputs and only the nodes that lead to them."""
    needed: set[int] = set()
    waiting = list(outputs)
    while waiting:
        number = waiting.pop()
        if number not in needed:
            needed.add(number)
            waiting += graph.nodes[number].upstream
    places = {number: place for place, number in enumerate(sorted(needed))}
    nodes = tuple(
        graph.nodes[number].remapped(place, lambda source: None if source is None else places[source])
        for number, place in places.items()
    )
    return dataclasses.replace(graph, nodes=nodes, outputs=tuple(places[number] for number in outputs))


def _in_order(values: Sequence[object], items: Sequence[Items]) -> list[object]:
    item_at: dict[int, object] = {}
    for value, positions in zip(values, items, strict=True):
        item_at.update(zip(positions, value if isinstance(value, list) and len(positions) > 1 else [value], strict=True))
    return [item_at[place] for place in range(len(item_at))]
