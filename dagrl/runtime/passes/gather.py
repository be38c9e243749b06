"""Assembles outputs that are lists: on the workers, in a tree, or in the driver.

A tree costs one hop per level, and each level copies large items. The driver reads the items of one host from a mailbox
(`mailbox.py`) at 1 to 2 us each, or in place if they are large. So trees are used for lists of very many small items, and
between hosts: the items of another host are collected on one of its workers and sent in one message.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dagrl.runtime.edges.packet import Header, Packet, PacketBody
from dagrl.runtime.graph import Node, NodeRef, PhaseGraph
from dagrl.runtime.passes.hosts import FAN_OUT, Hosts, by_host

DRIVER_PARTS = 128
"""The longest list of small items that the driver assembles itself; a hop of a tree takes as long as this many items."""

LARGE_BYTES = 4 << 20
"""Items are taken to be large if the phase's results may be larger than this."""


Items = tuple[int, ...]
"""Positions in a list of the items that one output of a graph holds: one item, or a list of several."""


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
