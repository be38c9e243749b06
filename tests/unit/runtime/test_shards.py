"""Several shards in one graph: each is a copy of the traced graph on its own workers, with its own rows of a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dagrl.runtime.compile import fuse
from dagrl.runtime.edges.pickling import Encoded, Shares
from dagrl.runtime.executors.base import GraphLimits, node_calls
from dagrl.runtime.executors.node import Take
from dagrl.runtime.graph import InputRef, Node, NodeRef, PhaseGraph, WorkerRef
from dagrl.runtime.passes.hosts import RELAY, Hosts, with_relays
from dagrl.runtime.shapes import Batch

LIMITS = GraphLimits(1 << 16, 1 << 16, 2, 1.0, 1.0, 1.0)


def node(number: int, role: str, position: int, *args: InputRef | NodeRef, method: str = "step") -> Node:
    return Node(number, WorkerRef(role, position), method, "call", args)


GRAPH = PhaseGraph(
    "phase",
    {"train": 2, "generation": 1},
    (
        node(0, "train", 0, InputRef()),
        node(1, "train", 1, InputRef(), NodeRef(0)),
        node(2, "generation", 0, NodeRef(1), method="end"),
    ),
    (2, 1),
)


@pytest.mark.parametrize("shards", [1, 3])
def test_every_shard_is_the_traced_graph_on_its_own_workers(shards: int) -> None:
    graph = fuse(GRAPH, shards)
    graph.validate()
    assert graph.widths == {"train": 2 * shards, "generation": shards}
    for shard in range(shards):
        mine = graph.nodes[3 * shard : 3 * shard + 3]
        back = [
            replace(
                one,
                number=one.number - 3 * shard,
                worker=WorkerRef(one.worker.role, one.worker.position - shard * GRAPH.widths[one.worker.role]),
                args=tuple(NodeRef(arg.node - 3 * shard) if isinstance(arg, NodeRef) else arg for arg in one.args),
            )
            for one in mine
        ]
        assert tuple(back) == GRAPH.nodes
        assert graph.outputs[2 * shard : 2 * shard + 2] == (3 * shard + 2, 3 * shard + 1)
        assert [graph.shard(one.worker) for one in mine] == [shard] * 3
        assert [graph.label(one) for one in mine] == ["train[0].step", "train[1].step", "generation[0].end"]


def inputs(graph: PhaseGraph) -> dict[str, list[Take]]:
    """What each worker's calls take, by the label of the call and the worker's position."""
    calls = [call for call in node_calls(graph, LIMITS) if call.kind != RELAY]
    return {f"{call.label} @{call.position}": [arg for arg in call.args if isinstance(arg, Take)] for call in calls}


def test_workers_take_only_their_shards_rows_of_the_input() -> None:
    found = inputs(fuse(GRAPH, 2))
    assert found["train[0].step @2"] == [Take(0, share=(1, 2))]
    assert found["train[1].step @1"] == [Take(0, share=(0, 2)), Take(1)]
    assert found["generation[0].end @1"] == [Take(0)]
    alone = inputs(fuse(GRAPH, 1))
    assert all(take.share is None for takes in alone.values() for take in takes)


def test_workers_of_another_host_take_their_rows_of_the_relayed_input() -> None:
    graph = fuse(GRAPH, 2)
    hosts = Hosts({one.worker: "there" for one in graph.nodes}, "here")
    relayed = with_relays(graph, hosts)
    assert relayed.nodes[0].kind == RELAY
    assert inputs(relayed) == inputs(graph)


def test_the_share_of_a_batch_is_a_view_and_other_values_stay_whole() -> None:
    batch = Batch({"x": np.arange(12.0).reshape(6, 2), "lengths": np.full(6, 2)}, {"lr": 0.5})
    mine = Take(0, share=(1, 3)).of(batch)
    assert isinstance(mine, Batch) and mine.scalars == {"lr": 0.5}
    np.testing.assert_array_equal(mine["x"], [[4.0, 5.0], [6.0, 7.0]])
    assert np.shares_memory(mine["x"], batch["x"])
    assert Take(0, share=(1, 3)).of([batch]) == [batch]
    assert Take(0).of(batch) is batch
    parts = Shares(tuple(Encoded.of(["part", number]) for number in range(3)))
    assert Take(0, share=(1, 3)).of(parts) == ["part", 1]
    assert Take(0, share=(1, 3)).of(Encoded.of(batch)).rows == 6  # type: ignore[attr-defined]
