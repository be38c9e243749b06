"""Where the parts of an output that is a list are put together: on the workers, in a tree, or in the driver.

A tree costs a hop a level and copies large parts at each of them; the driver reads the parts of one host from a mailbox
(`mailbox.py`), at 1 to 2 us a part, or in place where they are large. So a tree is for lists of very many small parts, and
for those of other hosts: each host's parts are collected on one of its workers and cross in one message.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dagrl.executors.hosts import FAN_OUT, Hosts, by_host
from dagrl.executors.packet import Header, Packet, Part
from dagrl.graph import Node, NodeRef, PhaseGraph

DRIVER_PARTS = 128
"""The longest list of small parts that the driver puts together itself; a hop of a tree takes as long as so many parts."""

LARGE_BYTES = 4 << 20
"""A phase whose results may be larger than this is taken to have large parts."""


@dataclass(frozen=True)
class Piece:
    """What one output of the graph holds of a list: the item at one place, or (`listed`) those at several."""

    places: tuple[int, ...]
    listed: bool


@dataclass(frozen=True)
class Gathering:
    """A graph without the lists that the driver makes, and of which of its outputs each output of the phase is made."""

    graph: PhaseGraph
    pieces: tuple[tuple[Piece, ...], ...]  # of each output of the phase; none: it is the graph's own

    @staticmethod
    def of(graph: PhaseGraph, result_bytes: int, hosts: Hosts | None = None) -> Gathering:
        """Take the lists that the driver makes out of `graph`, whose nodes have results of up to `result_bytes`."""
        longest = DRIVER_PARTS if result_bytes <= LARGE_BYTES else len(graph.nodes)
        nodes, outputs, pieces = list(graph.nodes), [], []
        for output in graph.outputs:
            leaves = _leaves(graph, output)
            made = _pieces(nodes, leaves, hosts) if 0 < len(leaves) <= longest else {output: None}
            outputs += list(made)
            pieces.append(tuple(piece for piece in made.values() if piece is not None))
        if len(set(outputs)) < len(outputs):  # a value that is in two outputs; rare, and not worth a rule
            return Gathering(graph, ((),) * len(graph.outputs))
        return Gathering(_pruned(dataclasses.replace(graph, nodes=tuple(nodes)), outputs), tuple(pieces))

    @functools.cached_property
    def _item_by_item(self) -> tuple[bool, ...]:
        """Whether each of the phase's outputs is a list whose items are the graph's outputs, one by one."""
        return tuple(not any(piece.listed for piece in pieces) for pieces in self.pieces)

    def put_together(self, header: Header, parts: Sequence[Part]) -> list[Packet]:
        """The packets of the phase's outputs from those of the graph's, given without their headers."""
        packets, start = [], 0
        for pieces, item_by_item in zip(self.pieces, self._item_by_item, strict=True):
            mine = parts[start : start + (len(pieces) or 1)]
            packets.append(_listed(header, mine, None if item_by_item else pieces) if pieces else Packet(header, *mine[0]))
            start += len(mine)
        return packets


def _pieces(nodes: list[Node], leaves: Sequence[int], hosts: Hosts | None) -> dict[int, Piece | None]:
    """The nodes whose values the driver reads for a list, after appending those that collect the parts of other hosts."""
    if hosts is None or not hosts.several:
        return {leaf: Piece((place,), listed=False) for place, leaf in enumerate(leaves)}
    made: dict[int, Piece | None] = {}
    far: list[tuple[int, tuple[int, ...]]] = []
    for host, places in by_host([nodes[leaf].worker for leaf in leaves], hosts).items():
        if host == hosts.driver:
            made |= {leaves[place]: Piece((place,), listed=False) for place in places}
        else:
            far.append((_collect(nodes, [leaves[place] for place in places]), tuple(places)))
    while len(far) > FAN_OUT:
        groups = [far[start : start + FAN_OUT] for start in range(0, len(far), FAN_OUT)]
        far = [(_collect(nodes, [one[0] for one in group]), sum((one[1] for one in group), ())) for group in groups]
    return made | {node: Piece(places, listed=True) for node, places in far}


def _collect(nodes: list[Node], parts: Sequence[int]) -> int:
    """Append a node that lists `parts`, on the worker of the first."""
    nodes.append(Node(len(nodes), nodes[parts[0]].worker, "", "collect", tuple(NodeRef(part) for part in parts)))
    return len(nodes) - 1


def _leaves(graph: PhaseGraph, number: int) -> list[int]:
    """The nodes whose values are the items of a list that the graph makes; empty for any other node."""
    node = graph.nodes[number]
    if node.kind != "collect":
        return []
    return [leaf for upstream in node.upstream for leaf in (_leaves(graph, upstream) or [upstream])]


def _pruned(graph: PhaseGraph, outputs: Sequence[int]) -> PhaseGraph:
    """The graph with these outputs and only the nodes that lead to them."""
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


def _listed(header: Header, parts: Sequence[Part], pieces: Sequence[Piece] | None) -> Packet:
    """The packet of a list, of which `parts` are the items, or what `pieces` say."""
    values, busy_s, failed = zip(*parts, strict=True)  # thrice as fast as three loops, and 64 parts are waited for
    if any(failed):
        return Packet(header, None, max(busy_s), tuple(dict.fromkeys(itertools.chain.from_iterable(failed))))
    return Packet(header, list(values) if pieces is None else _in_places(values, pieces), max(busy_s))


def _in_places(values: Sequence[object], pieces: Sequence[Piece]) -> list[object]:
    found: dict[int, object] = {}
    for value, piece in zip(values, pieces, strict=True):
        items = value if piece.listed and isinstance(value, list) else [value]
        found.update(zip(piece.places, items, strict=True))
    return [found[place] for place in range(len(found))]
