"""Where the parts of an output that is a list are put together: on the workers, in a tree, or in the driver.

A tree costs a hop a level and copies large parts at each of them; reading every part in the driver costs the driver some
10 us a part, one after the other. So lists that are short, or whose parts are large, are read part by part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from dagrl.executors.packet import Packet
from dagrl.graph import Node, NodeRef, PhaseGraph

DRIVER_PARTS = 8
"""The longest list of small parts that the driver puts together itself: with 8 workers that is as fast as a tree, with 32 a
tree takes three quarters of the time (docs/scaling.md)."""

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

    def put_together(self, packets: Sequence[Packet]) -> list[Packet]:
        """The packets of the phase's outputs from those of the graph's."""
        rest = iter(packets)
        return [_listed([next(rest) for _ in range(count)]) if count else next(rest) for count in self.parts]


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


def _listed(packets: Sequence[Packet]) -> Packet:
    failures = tuple(dict.fromkeys(failure for packet in packets for failure in packet.failures))
    values = None if failures else [packet.value for packet in packets]
    return Packet(packets[0].header, values, max(packet.busy_s for packet in packets), failures)
