"""Tracing phases: the graph of each construct, the error of every mistake, and that none of it needs Ray."""

import inspect
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dagrl.errors import GraphError
from dagrl.graphs.phases import train_step
from dagrl.refit.connect import refit
from dagrl.runtime.draw import Drawing, mermaid, size_text
from dagrl.runtime.graph import Constant, InputRef, Node, NodeRef, PhaseGraph, WorkerRef
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Input, Phase, Role, Shard, Value, join, methods_of, phase, replicas_per_graph
from dagrl.runtime.shapes import Field
from tests.unit.runtime.phase_worker import Both


class Worker:
    """Methods to trace against; none is ever called."""

    @staticmethod
    def environment(config: object) -> dict[str, str]:
        return {}

    def forward(self, x: object) -> object: ...
    def scaled(self, x: object, factor: float = 1.0, names: list[str] | None = None) -> object: ...
    def pair(self, x: object, y: object) -> object: ...
    def total(self, parts: list[object]) -> object: ...


class Awaited:
    """Methods of which one is `async`."""

    async def forward(self, x: object) -> object: ...
    def plain(self, x: object) -> object: ...


def role(name: str = "train", *transports: str, **sizes: int) -> Role:
    return Role(name, ParallelLayout(**sizes), methods_of(Worker), frozenset({"shm", *transports}))


def trace(function: Callable[..., Any], *roles: Role, arity: int = 8) -> PhaseGraph:
    return phase(function).trace({item.name: item for item in roles or (role(tp=2),)}, arity)


def edges(graph: PhaseGraph) -> list[tuple[str, str]]:
    return [(graph.nodes[number].label, node.label) for node in graph.nodes for number in node.upstream]


# What each construct gives.


def test_map_and_reduce() -> None:
    def step(train: Shard, batch: Input) -> Value:
        return train.reduce("total", train.map("scaled", batch, factor=2.0))

    assert trace(step) == PhaseGraph(
        "step",
        {"train": 2},
        (
            Node(0, WorkerRef("train", 0), "scaled", "call", (InputRef(),), (("factor", 2.0),)),
            Node(1, WorkerRef("train", 1), "scaled", "call", (InputRef(),), (("factor", 2.0),)),
            Node(2, WorkerRef("train", 0), "total", "reduce", (NodeRef(0), NodeRef(1))),
        ),
        (2,),
    )


def test_values_are_passed_worker_by_worker_or_broadcast() -> None:
    def step(train: Shard, batch: Input) -> Value:
        one = train[0].map("forward", batch)
        each = train.map("pair", one, batch)
        return join(train.map("pair", each, one))

    assert edges(trace(step))[:6] == [
        ("train[0].forward", "train[0].pair"),
        ("train[0].forward", "train[1].pair"),
        ("train[0].pair", "train[0].pair"),
        ("train[0].forward", "train[0].pair"),
        ("train[1].pair", "train[1].pair"),
        ("train[0].forward", "train[1].pair"),
    ]


def test_stages_are_the_pipelines_of_every_replica_in_the_graph() -> None:
    def step(train: Shard, generation: Shard, x: Input) -> Value:
        first, second = train.stages()
        assert [len(shard) for shard in (train, first, second)] == [8, 4, 4]
        y = second.map("forward", first.map("forward", x))
        return join(y, generation.map("forward", x))

    graph = trace(step, role(dp=2, pp=2, tp=2), role("generation", dp=1))
    assert edges(graph)[:4] == [
        ("train[0].forward", "train[2].forward"),
        ("train[1].forward", "train[3].forward"),
        ("train[4].forward", "train[6].forward"),
        ("train[5].forward", "train[7].forward"),
    ]


def test_join_keeps_the_order_given_on_the_first_worker() -> None:
    def step(train: Shard, generation: Shard, x: Input) -> Value:
        a, b = train.map("forward", x), generation.map("forward", x)
        return join(b, a)

    graph = trace(step, role(tp=2), role("generation", tp=2))
    assert graph.nodes[-1] == Node(
        4, WorkerRef("generation", 0), "", "collect", (NodeRef(2), NodeRef(3), NodeRef(0), NodeRef(1))
    )


def test_a_value_of_several_workers_is_joined_to_be_returned() -> None:
    def step(train: Shard, x: Input) -> Value:
        return train.map("forward", x)

    graph = trace(step)
    assert (graph.nodes[-1].kind, graph.outputs) == ("collect", (2,))


def test_via_sets_the_transport_of_the_values_own_nodes() -> None:
    def step(train: Shard, x: Input) -> Value:
        y = train.map("forward", x).via("nccl")
        return train.reduce("total", y)

    assert [node.transport for node in trace(step, role("train", "nccl", tp=2)).nodes] == ["nccl", "nccl", "shm"]


def test_constants_by_position_and_by_keyword() -> None:
    def step(train: Shard, x: Input) -> Value:
        return train[0].map("pair", x, [1, {"a": None}])

    def named(train: Shard, x: Input) -> Value:
        return train[0].map("scaled", x, names=["a", "b"], factor=0.5)

    assert trace(step).nodes[0].args == (InputRef(), Constant([1, {"a": None}]))
    assert trace(named).nodes[0].constants == (("factor", 0.5), ("names", ["a", "b"]))  # sorted: equal however written
    assert trace(named) == trace(named)


def test_slices_and_loops_over_a_shard() -> None:
    def step(train: Shard, x: Input) -> Value:
        first, *rest = train
        assert [len(item) for item in rest] == [1, 1, 1]
        return join(first.map("forward", x), train[2:].map("forward", x), train[-1].map("forward", x))

    assert [node.worker.position for node in trace(step, role(tp=4)).nodes] == [0, 2, 3, 3, 0]


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        ({"train": 4}, {"train": 1}),
        ({"train": 4, "generation": 2}, {"train": 2, "generation": 1}),
        ({"train": 3, "generation": 2}, {"train": 3, "generation": 2}),
        ({"train": 6, "generation": 6}, {"train": 1, "generation": 1}),
    ],
)
def test_groups_of_different_data_parallel_sizes(shards: dict[str, int], expected: dict[str, int]) -> None:
    def step(train: Shard, generation: Shard, x: Input) -> Value:
        return join(train.map("forward", x), generation.map("forward", x))

    assert replicas_per_graph(shards) == expected
    if len(shards) == 2:
        graph = trace(step, role(dp=shards["train"], tp=2), role("generation", dp=shards["generation"]))
        assert graph.widths == {"train": expected["train"] * 2, "generation": expected["generation"]}


@given(workers=st.integers(1, 150), arity=st.integers(2, 12), kind=st.sampled_from(["reduce", "join"]))
def test_trees_use_every_part_once_and_keep_their_order(workers: int, arity: int, kind: str) -> None:
    def step(train: Shard, x: Input) -> Value:
        parts = train.map("forward", x)
        return train.reduce("total", parts) if kind == "reduce" else join(parts)

    graph = trace(step, role(tp=workers), arity=arity)

    def leaves(number: int) -> list[int]:
        node = graph.nodes[number]
        return [leaf for above in node.upstream for leaf in leaves(above)] if node.kind != "call" else [node.worker.position]

    def depth(number: int) -> int:
        return max((1 + depth(above) for above in graph.nodes[number].upstream), default=0)

    assert leaves(graph.outputs[0]) == list(range(workers))
    joins = [node for node in graph.nodes if node.kind != "call"]
    assert all(node.worker == graph.nodes[node.upstream[0]].worker for node in joins)  # no copy for the first part
    assert all(1 <= len(node.upstream) <= arity for node in joins)
    levels, room = 1, arity
    while room < workers:
        levels, room = levels + 1, room * arity
    assert depth(graph.outputs[0]) == levels
    graph.validate()


# Mistakes.


def annotated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Annotates the shards of a lambda, which cannot do so itself."""
    shards = [name for name in inspect.signature(function).parameters if name in ("train", "generation")]
    function.__annotations__ = dict.fromkeys(shards, Shard)
    return function


def unused(train: Shard, x: Input) -> Value:
    train[1].map("forward", x)
    return train[0].map("forward", x)


def test_async_methods_are_traced_as_plain_ones() -> None:
    def step(train: Shard, x: Input) -> Value:
        return train.map("plain", train.map("forward", x))

    assert len(trace(step, Role("train", ParallelLayout(), methods_of(Awaited))).nodes) == 2


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda train, x: train.map("foward", x), "the train worker has no method 'foward'; it has forward, pair, .*total"),
        (lambda train, x: train.map("environment", x), "has no method 'environment'"),
        (lambda train, x: train.map("forward", x, x), "forward is called with 2 positional .* none by name"),
        (lambda train, x: train.map("scaled", x, faktor=2), r"\['faktor'\] by name, but its signature is scaled.*factor: "),
        (lambda train, x: train.map("pair", x), "pair is called with 1 positional .* missing a required argument: 'y'"),
        (lambda train, x: join(train.map("forward", x), train.map("forward", 3)), "does not depend on the input; pass"),
        (unused, r"the result of node train\[1\].forward is not used; return it, or join\(\) it"),
        (lambda train, x: train.map("forward", x).via("nccl"), r"transport 'nccl' .* by the train group; it has shm"),
        (lambda train, x: train[0:3].map("forward", train.map("forward", x)), "an argument has 4 values for 3 workers"),
        (lambda train, generation, x: train.reduce("total", generation.map("forward", x)), r"'total'\) .* of another role"),
        (lambda train, x: None, "it returns None; return a value from map, reduce or join"),
        (lambda train, x: x, r"it returns Input\(name='x'\); return a value from map"),
        (lambda train, x: train.map("scaled", x, factor=np.float32(2)), "'factor': the constant .* contains a float32"),
        (lambda train, x: train.map("pair", x, [1, ("a", "b")]), r"the constant \[1, \('a', 'b'\)\] contains a tuple"),
        (lambda train, x: train.map("pair", x, {1: "a"}), "{1: 'a'} contains a int; .* dictionaries with string keys"),
        (lambda train, x: train.map("pair", x, z=x), r"with 1 positional .* \['z'\] by name, but its signature"),
        (lambda train, x: train.spread("missing", x), "the train worker has no method 'missing'"),
        (lambda train, x: train.map("pair", x, [x]), "train.pair: the constant .* contains a Input"),
        (lambda train, x: train.reduce("total", x), r"given .*Input.*, which is not from a map, reduce or join"),
        (lambda train, x: train[4].map("forward", x), r"train\[4\] is outside a shard of 4 workers"),
        (lambda train, x: train[len(train) :].map("forward", x), r"\(4, None, None\) selects none of the 4 train workers"),
    ],
)
def test_mistakes_name_phase_node_and_remedy(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(GraphError, match=f"phase '{function.__name__}'.*{words}"):
        trace(annotated(function), role(tp=4), role("generation", tp=4))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda train, x: join(), r"join\(\) needs at least one value"),
        (
            lambda train, generation, x: generation.map("forward", train[0].map("forward", x).via("nccl")),
            r"generation\[0\].forward reads train\[0\].forward via 'nccl', which the generation",
        ),
        (lambda train, x: train[0].map("forward", x).via("nccl"), r"\[0\].forward is an output via 'nccl', but the driver"),
    ],
)
def test_mistakes_with_values_and_transports_name_the_remedy(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(GraphError, match=words):
        trace(annotated(function), role("train", "nccl", tp=4), role("generation", tp=4))


def test_values_of_another_phase_are_refused() -> None:
    kept: list[Value] = []

    def first(train: Shard, x: Input) -> Value:
        kept.append(train[0].map("forward", x))
        return kept[0]

    def passes(train: Shard, x: Input) -> Value:
        return train[0].map("forward", kept[0])

    def joins(train: Shard, x: Input) -> Value:
        return join(train[0].map("forward", x), kept[0])

    def returns(train: Shard, x: Input) -> Value:
        return kept[0]

    trace(first)
    for function in (passes, joins, returns):
        with pytest.raises(GraphError, match="which is not from a map, reduce or join of this phase"):
            trace(function)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x, "phase '<lambda>' has no parameter annotated Shard"),
        (lambda train, x, y: x, r"takes 2 inputs \['x', 'y'\]; it takes exactly one"),
        (lambda train: train, "takes 0 inputs"),
    ],
)
def test_functions_that_cannot_be_phases(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(GraphError, match=words):
        phase(annotated(function))


@pytest.mark.parametrize("dtype", ["int4", "bfloat16", "torch.float32"])
def test_a_field_with_an_unknown_dtype_is_named(dtype: str) -> None:
    def forward(train: Shard, batch: Input) -> Value:
        return train.map("forward", batch)

    with pytest.raises(GraphError, match=f"field 'x' of a phase's inputs has the dtype '{dtype}', which numpy"):
        phase(inputs={"x": Field(dtype)})(forward)


def test_a_missing_group_is_named() -> None:
    with pytest.raises(GraphError, match="phase 'unused' needs worker groups train; there are actor, critic"):
        trace(unused, role("actor"), role("critic"))


@pytest.mark.parametrize("annotation", [Shard, "Shard", "phase.Shard", "dagrl.runtime.phase.Shard"])
def test_shards_are_known_by_their_annotation_however_it_is_imported(annotation: object) -> None:
    def step(workers, value):  # type: ignore[no-untyped-def]
        return workers.map("forward", value)

    step.__annotations__ = {"workers": annotation}
    assert phase(step).roles == ("workers",)
    assert phase(step).input_name == "value"


def test_decorator_with_inputs() -> None:
    @phase(inputs={"lengths": Field("int64", "row")})
    def step(train: Shard, batch: Input) -> Value:
        return train.map("forward", batch)

    assert isinstance(step, Phase)
    assert (step.name, step.roles, step.inputs) == ("step", ("train",), {"lengths": Field("int64", "row")})
    assert step.trace({"train": role()}).phase == "step"


def test_values_may_be_passed_by_name() -> None:
    def step(train: Shard, batch: Input) -> Value:
        return train.map("pair", y=train.map("forward", x=batch), x=batch)

    first, _, second, last, *_ = trace(step).nodes
    assert (first.args, first.keywords) == ((InputRef(),), ("x",))
    assert (second.args, second.keywords) == ((NodeRef(0), InputRef()), ("y", "x"))
    assert last.args[0] == NodeRef(1)


def test_private_methods_and_dispatchers_are_methods() -> None:
    class Fused:
        def _fuw_execute(self, name: str, *args: object, **kwargs: object) -> object: ...

    methods = methods_of(Worker)
    assert sorted(methods) == ["forward", "pair", "scaled", "total"]
    assert list(methods["pair"].parameters) == ["x", "y"], "without self"
    fused = Role("train", ParallelLayout(), methods_of(Fused))

    def step(train: Shard, x: Input) -> Value:
        return train.map("_fuw_execute", "actor_fwmn_update", data=x)

    graph = trace(step, fused)
    (node,) = graph.nodes
    assert (node.method, node.args, node.keywords) == (
        "_fuw_execute",
        (Constant("actor_fwmn_update"), InputRef()),
        ("data",),
    )


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
