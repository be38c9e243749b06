"""Several shards of a phase in one graph: one message brings all of them their input, one mailbox the driver their results.

With a graph for each shard, the driver would write, wait and read once a shard, some 40 us each. A batch holds the rows of
all shards of the graph, one shard's after the other's, and is copied into shared memory once; each worker takes its shard's
rows out of it, as views.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dagrl.graph import Node, PhaseGraph, WorkerRef


@dataclass(frozen=True)
class ShardsGraph(PhaseGraph):
    """The graphs of `shards` shards side by side, the workers of one after those of the other.

    `splits`: a batch that comes in is of all shards, equally many rows of each.
    """

    shards: int = 1
    splits: bool = False

    def shard(self, worker: WorkerRef) -> int:
        """The shard that a worker belongs to."""
        return worker.position // (self.widths[worker.role] // self.shards)

    def label(self, node: Node) -> str:
        """A node's label in the graph of its shard alone."""
        width = self.widths[node.worker.role] // self.shards
        return dataclasses.replace(node, worker=WorkerRef(node.worker.role, node.worker.position % width)).label


def side_by_side(graph: PhaseGraph, shards: int, splits: bool) -> ShardsGraph:
    """`shards` copies of the graph of one shard in one. `splits`: as in `ShardsGraph`; a batch of one shard is its own."""
    size = len(graph.nodes)
    return ShardsGraph(
        phase=graph.phase,
        widths={role: shards * width for role, width in graph.widths.items()},
        nodes=tuple(_copy(graph, node, shard) for shard in range(shards) for node in graph.nodes),
        outputs=tuple(shard * size + number for shard in range(shards) for number in graph.outputs),
        shards=shards,
        splits=splits and shards > 1,
    )


def _copy(graph: PhaseGraph, node: Node, shard: int) -> Node:
    first = shard * len(graph.nodes)
    worker = WorkerRef(node.worker.role, shard * graph.widths[node.worker.role] + node.worker.position)
    moved = node.remapped(first + node.number, lambda source: None if source is None else first + source)
    return dataclasses.replace(moved, worker=worker)
