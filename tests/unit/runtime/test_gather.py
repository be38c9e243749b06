"""Which lists the driver assembles, and what is left of the graph then."""

from __future__ import annotations

import pytest

from dagrl.runtime.edges.packet import Header, PacketBody
from dagrl.runtime.graph import PhaseGraph
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.passes.gather import DRIVER_PARTS, LARGE_BYTES, Gathering
from dagrl.runtime.phase import Role, Shard, join, methods_of, phase


class Worker:
    def rank(self, value: object) -> int:
        return 0

    def total(self, parts: list[int]) -> int:
        return sum(parts)


@phase
def ranks(train: Shard, value):
    return train.map("rank", value)


@phase
def ranks_and_total(train: Shard, value):
    mine = train.map("rank", value)
    return join(mine), train.reduce("total", mine)


def traced(item, workers: int, arity: int = 8) -> PhaseGraph:
    return item.trace({"train": Role("train", ParallelLayout(tp=workers), methods_of(Worker))}, arity)


HEADER = Header("ranks", 0, False, {"train": 0}, 10.0)


def part(value: object, busy_s: float = 0.0) -> PacketBody:
    return value, busy_s, ()


@pytest.mark.parametrize("workers", [2, 3, DRIVER_PARTS])
def test_a_short_list_is_assembled_in_the_driver_in_order(workers: int) -> None:
    gathering = Gathering.of(traced(ranks, workers, arity=2), 1 << 20)
    gathering.graph.validate()
    assert all(node.kind == "call" for node in gathering.graph.nodes)
    positions = [gathering.graph.nodes[number].worker.position for number in gathering.graph.outputs]
    assert positions == list(range(workers))
    (listed,) = gathering.put_together(HEADER, [part(number, number / 10) for number in range(workers)])
    assert listed.value == list(range(workers))
    assert listed.busy_s == (workers - 1) / 10


def test_a_long_list_of_small_items_stays_a_tree() -> None:
    graph = traced(ranks, DRIVER_PARTS + 1)
    gathering = Gathering.of(graph, 1 << 20)
    assert gathering.graph == graph
    assert gathering.put_together(HEADER, [part([1, 2])])[0].value == [1, 2]


def test_a_long_list_of_large_items_is_assembled_in_the_driver() -> None:
    gathering = Gathering.of(traced(ranks, 64), LARGE_BYTES + 1)
    assert len(gathering.graph.outputs) == len(gathering.graph.nodes) == 64


def test_several_outputs_keep_their_order_and_reductions_stay_on_the_workers() -> None:
    gathering = Gathering.of(traced(ranks_and_total, 3), 1 << 20)
    gathering.graph.validate()
    assert [node.kind for node in gathering.graph.nodes] == ["call", "call", "call", "reduce"]
    listed, total = gathering.put_together(HEADER, [part(1), part(2), part(3), part(6)])
    assert (listed.value, total.value) == ([1, 2, 3], 6)


def test_failures_of_all_items_are_kept_once() -> None:
    from dagrl.errors import WorkerFailure

    failure = WorkerFailure("train", 1, "dp 0", "host", 1, "ranks", 0, "train[1].rank", "raised", "message", "")
    gathering = Gathering.of(traced(ranks, 2), 1 << 20)
    (listed,) = gathering.put_together(HEADER, [part(1), (None, 0.0, (failure,))])
    assert listed.value is None
    assert listed.failures == (failure,)
