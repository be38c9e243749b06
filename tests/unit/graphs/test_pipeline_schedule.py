"""The pipeline phase's graph, traced without Ray: 1F1B on every stage, its memory and its bubble against the closed form."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dagrl.errors import DataError, GraphError
from dagrl.graphs.pipeline import PipelineWorker, pipeline_phase, split_microbatches
from dagrl.runtime.graph import Node, PhaseGraph
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Role, methods_of
from dagrl.runtime.shapes import Batch

DIRECTIONS = ("forward", "backward")


def trace(stages: int, microbatches: int, tp: int = 1, transport: str = "shm") -> PhaseGraph:
    layout = ParallelLayout(dp=1, pp=stages, tp=tp)
    role = Role("train", layout, methods_of(PipelineWorker), frozenset({"shm", "nccl"}))
    return pipeline_phase(microbatches, transport).trace({"train": role})


def works(graph: PhaseGraph, worker: int) -> list[tuple[str, int]]:
    """A worker's forwards and backwards, in the order of its nodes."""
    mine = [node for node in graph.nodes if node.worker.position == worker and node.method in DIRECTIONS]
    return [(node.method, microbatch_of(node)) for node in mine]


def microbatch_of(node: Node) -> int:
    return int(dict(node.constants)["microbatch"])  # type: ignore[arg-type]


def finish_time(graph: PhaseGraph, seconds: dict[str, int]) -> int:
    """When the last backward ends if workers run their nodes in order, each as soon as what it reads is there."""
    free: Counter[int] = Counter()
    ends: dict[int, int] = {}
    for node in graph.nodes:
        start = max([free[node.worker.position], *(ends[number] for number in node.upstream)])
        ends[node.number] = free[node.worker.position] = start + seconds.get(node.method, 0)
    return max(ends.values())


SIZES = {"stages": st.integers(1, 7), "microbatches": st.integers(1, 12), "tp": st.integers(1, 2)}


@settings(max_examples=30)
@given(**SIZES)
def test_every_stage_runs_every_microbatch_once_and_holds_few_activations(stages: int, microbatches: int, tp: int) -> None:
    graph = trace(stages, microbatches, tp)
    for worker in range(stages * tp):
        mine = works(graph, worker)
        assert sorted(mine) == sorted((direction, number) for direction in DIRECTIONS for number in range(microbatches))
        held = np.cumsum([1 if direction == "forward" else -1 for direction, _ in mine])
        assert held.max() == min(stages - worker // tp, microbatches)
        assert held.min() >= 0


@settings(max_examples=30)
@given(**SIZES, forward=st.integers(1, 3), backward=st.integers(1, 5))
def test_the_bubble_is_that_of_the_closed_form(stages: int, microbatches: int, tp: int, forward: int, backward: int) -> None:
    graph = trace(stages, microbatches, tp)
    taken = finish_time(graph, {"forward": forward, "backward": backward})
    ideal = microbatches * (forward + backward)
    assert taken - ideal == (stages - 1) * (forward + backward)  # Narayanan et al. 2021, section 2.2.1


def test_the_order_of_the_paper_at_four_stages_and_eight_microbatches() -> None:
    graph = trace(4, 8)
    orders = [" ".join(f"{direction[0]}{number + 1}" for direction, number in works(graph, stage)) for stage in range(4)]
    assert orders == [  # Narayanan et al. 2021, figure 4 (top)
        "f1 f2 f3 f4 b1 f5 b2 f6 b3 f7 b4 f8 b5 b6 b7 b8",
        "f1 f2 f3 b1 f4 b2 f5 b3 f6 b4 f7 b5 f8 b6 b7 b8",
        "f1 f2 b1 f3 b2 f4 b3 f5 b4 f6 b5 f7 b6 f8 b7 b8",
        "f1 b1 f2 b2 f3 b3 f4 b4 f5 b5 f6 b6 f7 b7 f8 b8",
    ]


@given(**SIZES)
@settings(max_examples=12)
def test_only_values_between_stages_use_the_transport(stages: int, microbatches: int, tp: int) -> None:
    graph = trace(stages, microbatches, tp, "nccl")
    crossing = {
        number
        for node in graph.nodes
        if node.method in DIRECTIONS
        for number in node.upstream
        if graph.nodes[number].worker != node.worker and graph.nodes[number].method in DIRECTIONS
    }
    assert {node.number for node in graph.nodes if node.transport == "nccl"} == crossing
    for number in crossing:  # one reader each, on the same place of the neighbouring stage
        (reader,) = (node for node in graph.nodes if number in node.upstream)
        assert abs(reader.worker.position - graph.nodes[number].worker.position) == tp


def test_a_pipeline_without_microbatches_is_refused() -> None:
    with pytest.raises(GraphError, match="at least one"):
        pipeline_phase(0)


def test_microbatches_are_copies_of_equally_many_rows() -> None:
    batch = Batch({"tokens": np.arange(12).reshape(6, 2), "lengths": np.full(6, 2)}, {"scale": 3.0})
    parts = split_microbatches(batch, 3)
    assert [part["tokens"].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert all(part.scalars == {"scale": 3.0} for part in parts)
    assert not any(np.shares_memory(part["tokens"], batch["tokens"]) for part in parts)
    with pytest.raises(DataError, match="cannot be split into 4"):
        split_microbatches(batch, 4)
