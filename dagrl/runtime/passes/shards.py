"""Fuses several shards of a phase into one graph: one message carries their input, one mailbox their results.

With one graph per shard, the driver writes, waits and reads once per shard, about 40 us each. A batch holds the rows of all
shards of the graph, one shard after the other, and is copied into shared memory once. Each worker takes its shard's rows out
of it as views.
"""

from __future__ import annotations

import dataclasses

from dagrl.runtime.graph import Node, PhaseGraph, WorkerRef


def fuse(graph: PhaseGraph, shards: int) -> PhaseGraph:
    """Returns `shards` copies of the graph of one shard as one graph."""
    size = len(graph.nodes)
    return PhaseGraph(
        phase=graph.phase,
        widths={role: shards * width for role, width in graph.widths.items()},
        nodes=tuple(_copy(graph, node, shard) for shard in range(shards) for node in graph.nodes),
        outputs=tuple(shard * size + number for shard in range(shards) for number in graph.outputs),
        shards=shards,
    )


def _copy(graph: PhaseGraph, node: Node, shard: int) -> Node:
    first = shard * len(graph.nodes)
    worker = WorkerRef(node.worker.role, shard * graph.widths[node.worker.role] + node.worker.position)
    moved = node.remapped(first + node.number, lambda source: None if source is None else first + source)
    return dataclasses.replace(moved, worker=worker)
