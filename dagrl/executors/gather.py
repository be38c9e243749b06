"""Where the parts of an output that is a list are put together: on the workers, in a tree, or in the driver.

A tree costs a hop a level and copies large parts at each of them; the driver reads the parts of one host from a mailbox
(`mailbox.py`), at 1 to 2 us a part, or in place where they are large. So a tree is for lists of very many small parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from dagrl.executors.packet import Header, Packet, Part
from dagrl.graph import Node, NodeRef, PhaseGraph

DRIVER_PARTS = 128
"""The longest list of small parts that the driver puts together itself; a hop of a tree takes as long as so many parts."""

LARGE_BYTES = 4 << 20
"""A phase whose results may be larger than this is taken to have large parts."""


@dataclass(frozen=True)
class Gathering:
    """A graph without the lists that the driver makes, and how many of its outputs each output of the phase is made of."""

    graph: PhaseGraph
    parts: tuple[int, ...]  # 0: the output as it is

    @staticmethod
    def of(graph: PhaseGraph, result_bytes: int) -> Gathering:
        """Take the lists that the driver makes out of `graph`, whose nodes have results of up to `result_bytes`."""
        longest = DRIVER_PARTS if result_bytes <= LARGE_BYTES else len(graph.nodes)
        leaves = [_leaves(graph, number) for number in graph.outputs]
        short = [len(parts) if len(parts) <= longest else 0 for parts in leaves]
        outputs = [
            number
            for output, parts, count in zip(graph.outputs, leaves, short, strict=True)
            for number in (parts if count else [output])
        ]
        if len(set(outputs)) < len(outputs):  # a value that is in two outputs; rare, and not worth a rule
            return Gathering(graph, (0,) * len(graph.outputs))
        return Gathering(_pruned(graph, outputs), tuple(short))

    def put_together(self, header: Header, parts: Sequence[Part]) -> list[Packet]:
        """The packets of the phase's outputs from those of the graph's, given without their headers."""
        packets, start = [], 0
        for count in self.parts:
            mine = parts[start : start + (count or 1)]
            packets.append(_listed(header, mine) if count else Packet(header, *mine[0]))
            start += count or 1
        return packets


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
    nodes = tuple(_renumbered(graph.nodes[number], places) for number in sorted(needed))
    return dataclasses.replace(graph, nodes=nodes, outputs=tuple(places[number] for number in outputs))


def _renumbered(node: Node, places: dict[int, int]) -> Node:
    args = tuple(NodeRef(places[arg.node]) if isinstance(arg, NodeRef) else arg for arg in node.args)
    return dataclasses.replace(node, number=places[node.number], args=args)


def _listed(header: Header, parts: Sequence[Part]) -> Packet:
    failures = tuple(dict.fromkeys([failure for part in parts if part[2] for failure in part[2]]))
    values = None if failures else [part[0] for part in parts]
    return Packet(header, values, max([part[1] for part in parts]), failures)
