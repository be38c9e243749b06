"""Mermaid charts of graphs: they have every node and edge once, and only lines that parse."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from dagrl.graphs.phases import train_step
from dagrl.refit.connect import refit
from dagrl.runtime.draw import Drawing, mermaid, size_text
from dagrl.runtime.graph import NodeRef
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Input, Phase, Role, Shard, Value, join, methods_of, phase
from tests.unit.runtime.phase_worker import Both

NODE_LINE = re.compile(r'^ *p(\d+)_n(\d+)\["(.*)"\]:::(run|reduce|collect)$')
EDGE_LINE = re.compile(r'^ *p(\d+)_(input|n\d+) -->\|"(.*)"\| p\1_(result|n\d+)$')


@phase
def pipeline(train: Shard, x: Input) -> Value:
    """Forward and backward over the stages, for two microbatches."""
    stages, done = train.stages(), []
    for _ in range(2):
        y: Value | Input = x
        kept = []
        for stage in stages:
            y = stage.map("forward", y, note="first").via("nccl")
            kept.append(y)
        for stage, seen in zip(reversed(stages), reversed(kept), strict=True):
            y = stage.map("backward", seen, y).via("nccl")
        done.append(y)
    return join(*[value for value in done if isinstance(value, Value)])


@phase
def outputs(train: Shard, x: Input) -> Value:
    """A value that is read twice, by one node, and returned as well."""
    first = train[0].map("forward", x)
    return join(first, train[1].map("backward", first, first), train.reduce("merge_reports", train.map("send_weights", x)))


def drawing(item: Phase, arity: int = 4, **layouts: ParallelLayout) -> Drawing:
    methods = methods_of(Both)
    roles = {name: Role(name, layout, methods, frozenset({"shm", "nccl"})) for name, layout in layouts.items()}
    graph = item.trace(roles, arity)
    return Drawing(graph, layouts, {None: 70_000, **{node.number: 1 << 20 for node in graph.nodes}})


DRAWINGS = [
    [drawing(train_step, train=ParallelLayout())],
    [drawing(train_step, train=ParallelLayout(tp=2))],
    [drawing(train_step, train=ParallelLayout(dp=2, pp=8, tp=8))],
    [drawing(refit, train=ParallelLayout(dp=2, tp=2), generation=ParallelLayout(dp=3, tp=2))],
    [drawing(pipeline, train=ParallelLayout(pp=3))],
    [drawing(outputs, train=ParallelLayout(tp=3)), drawing(pipeline, train=ParallelLayout(pp=2, tp=2))],
]
EACH = pytest.mark.parametrize("drawings", DRAWINGS, ids=lambda item: "+".join(each.graph.phase for each in item))


def expected_edges(item: Drawing) -> Counter[tuple[str, str]]:
    """From the graph itself."""
    read = {(f"n{arg.node}" if isinstance(arg, NodeRef) else "input", f"n{node.number}")
            for node in item.graph.nodes for arg in node.args if not hasattr(arg, "value")}  # fmt: skip
    return Counter(read | {(f"n{number}", "result") for number in item.graph.outputs})


@EACH
def test_mermaid_has_every_node_and_edge_once(drawings: list[Drawing]) -> None:
    lines = mermaid(drawings).splitlines()
    assert lines[0] == "flowchart LR"
    nodes = [match for line in lines if (match := NODE_LINE.match(line))]
    edges = [match for line in lines if (match := EDGE_LINE.match(line))]
    for index, item in enumerate(drawings):
        mine = [match for match in nodes if match[1] == str(index)]
        assert {int(match[2]): match[3] for match in mine} == {node.number: node.label for node in item.graph.nodes}
        assert len(mine) == len(item.graph.nodes)
        assert Counter((match[2], match[4]) for match in edges if match[1] == str(index)) == expected_edges(item)
    rest = [line.strip() for line in lines if not NODE_LINE.match(line) and not EDGE_LINE.match(line)]
    assert rest.count("end") == sum(line.startswith("subgraph ") for line in rest)
    known = r'flowchart LR|end|subgraph p\w+\["[^"<>`]*"\]|p\d+_(input|result)\(\["\w+"\]\):::driver|classDef \w+ \S+'
    assert not [line for line in rest if not re.fullmatch(known, line)]


def test_titles_count_equal_graphs_and_edges_show_their_capacity() -> None:
    item = drawing(refit, train=ParallelLayout(dp=4, pp=2, tp=2), generation=ParallelLayout(dp=2))
    assert item.title == "refit: one of 2 equal graphs"
    edges = [match for line in mermaid([item]).splitlines() if (match := EDGE_LINE.match(line))]
    assert {(match[2] == "input", match[3]) for match in edges} == {(True, "shm, 68.4 KiB"), (False, "shm, 1 MiB")}


def test_sizes() -> None:
    sizes = [0, 1023, 1024, 1536, 64 << 10, 200_000, 5 << 30]
    assert [size_text(size) for size in sizes] == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "64 KiB", "195 KiB", "5 GiB"]
