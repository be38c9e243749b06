"""Tracing phases: the graph of each construct, the error of every mistake, drawings, and passes over graphs. Without Ray."""

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dagrl.errors import GraphError, WorkerFailure
from dagrl.graphs.phases import train_step
from dagrl.refit.connect import refit
from dagrl.runtime.draw import Drawing, mermaid, size_text
from dagrl.runtime.edges.link import LinkWriter
from dagrl.runtime.edges.packet import ENVELOPE_BYTES, Header, Packet, PacketBody, payload_bytes
from dagrl.runtime.edges.pickling import dump
from dagrl.runtime.edges.ring import Ring
from dagrl.runtime.executors.base import GraphLimits, node_calls, result_rooms
from dagrl.runtime.executors.node import install, run_node
from dagrl.runtime.graph import Constant, Node, NodeRef, PhaseGraph, WorkerRef
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.passes import DRIVER_PARTS, FAN_OUT, LARGE_BYTES, RELAY, Gathering, Hosts, with_relays
from dagrl.runtime.phase import Input, Phase, Role, Shard, Value, join, methods_of, phase, replicas_per_graph
from dagrl.runtime.shapes import Field
from tests.unit.runtime.doubles import Both


class Worker:
    """Methods to trace against; none is ever called."""

    @staticmethod
    def environment(config: object) -> dict[str, str]:
        return {}

    def forward(self, x: object, *, _ray_trace_ctx: object = None) -> object: ...  # as Ray changes it
    def scaled(self, x: object, factor: float = 1.0, names: Any = None, kind: "Literal['a', 'b']" = "a") -> object: ...
    def pair(self, x: object, y: object) -> object: ...
    def total(self, parts: list[object]) -> object: ...

    vars()["scaled"].__signature__ = inspect.signature(vars()["scaled"])  # with text, as Ray leaves it


class Own:
    """An `async` method, a plain one, and one that calls others by name."""

    async def forward(self, x: object) -> object: ...
    def plain(self, x: object) -> object: ...
    def _fuw_execute(self, name: str, *args: object, **kwargs: object) -> object: ...


def role(name: str = "train", *transports: str, **sizes: int) -> Role:
    return Role(name, ParallelLayout(**sizes), methods_of(Worker), frozenset({"shm", *transports}))


def trace(function: Callable[..., Any], *roles: Role, arity: int = 8) -> PhaseGraph:
    return phase(function).trace({item.name: item for item in roles or (role(tp=2),)}, arity)


def annotated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Annotates the shards of a lambda, which cannot do so itself."""
    shards = [name for name in inspect.signature(function).parameters if name in ("train", "generation")]
    function.__annotations__ = dict.fromkeys(shards, Shard)
    return function


def written(node: Node) -> str:
    """Writes the call of a node, such as `train[0].pair(x, n1)`: x is the input, and n1 the result of node 1."""
    args = []
    for arg in node.args:
        args.append(repr(arg.value) if isinstance(arg, Constant) else f"n{arg.node}" if isinstance(arg, NodeRef) else "x")
    places = len(args) - len(node.keywords)
    args[places:] = [f"{name}={arg}" for name, arg in zip(node.keywords, args[places:], strict=True)]
    args += [f"{name}={value!r}" for name, value in node.constants]
    call = f"{node.label}([{', '.join(args)}])" if node.kind == "reduce" else f"{node.label}({', '.join(args)})"
    return call if node.transport == "shm" else f"{call} via {node.transport}"


def everywhere(train: Shard, generation: Shard, x: Input) -> Value:
    return join(train.map("forward", x), generation.map("forward", x))


def broadcast(train: Shard, x: Input) -> Value:
    one = train[0].map("forward", x)
    return train.map("pair", train.map("pair", one, x), one)


TP2, OWN = role(tp=2), Role("train", ParallelLayout(), methods_of(Own))
CONSTRUCTS: dict[str, tuple[Callable[..., Any], list[Role], str]] = {
    "map and reduce": (
        lambda train, x: train.reduce("total", train.map("scaled", x, factor=2.0)),
        [TP2],
        "train[0].scaled(x, factor=2.0); train[1].scaled(x, factor=2.0); train[0].total([n0, n1])",
    ),
    "values by worker, and one for all": (
        broadcast,
        [TP2],
        "train[0].forward(x); train[0].pair(n0, x); train[1].pair(n0, x); train[0].pair(n1, n0); train[1].pair(n2, n0);"
        " train[0].collect(n3, n4)",
    ),
    "stages of every replica in the graph": (
        lambda train, generation, x: join(
            train.stages()[1].map("forward", train.stages()[0].map("forward", x)), generation.map("forward", x)
        ),
        [role(dp=2, pp=2, tp=2), role("generation", dp=1)],
        "train[0].forward(x); train[1].forward(x); train[4].forward(x); train[5].forward(x); train[2].forward(n0);"
        " train[3].forward(n1); train[6].forward(n2); train[7].forward(n3); generation[0].forward(x);"
        " train[2].collect(n4, n5, n6, n7, n8)",
    ),
    "a join in the given order, on the first worker": (
        lambda train, generation, x: join(*reversed([train.map("forward", x), generation.map("forward", x)])),
        [TP2, role("generation", tp=1)],
        "train[0].forward(x); train[1].forward(x); generation[0].forward(x); generation[0].collect(n2, n0, n1)",
    ),
    "a transport": (
        lambda train, x: train.reduce("total", train.map("forward", x).via("nccl")),
        [role("train", "nccl", tp=2)],
        "train[0].forward(x) via nccl; train[1].forward(x) via nccl; train[0].total([n0, n1])",
    ),
    "a constant": (lambda train, x: train.map("pair", x, [1, {"a": None}]), [role()], "train[0].pair(x, [1, {'a': None}])"),
    "constants by name, sorted": (
        lambda train, x: train.map("scaled", x, names=["a", "b"], factor=0.5),
        [role()],
        "train[0].scaled(x, factor=0.5, names=['a', 'b'])",
    ),
    "slices and loops over a shard": (
        lambda train, x: join(*[one.map("forward", x) for one in train], train[1:].map("forward", x)),
        [role(tp=3)],
        "train[0].forward(x); train[1].forward(x); train[2].forward(x); train[1].forward(x); train[2].forward(x);"
        " train[0].collect(n0, n1, n2, n3, n4)",
    ),
    "the last worker": (lambda train, x: train[-1].map("forward", x), [TP2], "train[1].forward(x)"),
    "values by name": (
        lambda train, x: train.map("pair", y=train.map("forward", x=x), x=x),
        [role()],
        "train[0].forward(x=x); train[0].pair(y=n0, x=x)",
    ),
    "async methods": (
        lambda train, x: train.map("plain", train.map("forward", x)),
        [OWN],
        "train[0].forward(x); train[0].plain(n0)",
    ),
    "a dispatcher": (
        lambda train, x: train.map("_fuw_execute", "actor_fwmn_update", data=x),
        [OWN],
        "train[0]._fuw_execute('actor_fwmn_update', data=x)",
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_each_construct_gives_its_calls(name: str) -> None:
    """A value of several workers is joined to be returned."""
    function, roles, calls = CONSTRUCTS[name]
    graph = trace(annotated(function), *roles)
    assert [written(node) for node in graph.nodes] == calls.split("; ")
    assert (graph.phase, graph.outputs) == (function.__name__, (len(graph.nodes) - 1,))
    assert graph.widths == {item.name: item.layout.world_size for item in roles}


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
    assert replicas_per_graph(shards) == expected
    if len(shards) == 2:
        groups = role(dp=shards["train"], tp=2), role("generation", dp=shards["generation"])
        graph = trace(everywhere, *groups)
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


def unused(train: Shard, x: Input) -> Value:
    train[1].map("forward", x)
    return train[0].map("forward", x)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda train, x: train.map("foward", x), "the train worker has no method 'foward'; it has forward, pair, scaled,"),
        (lambda train, x: train.map("scaled", x, kind="c"), r"train.scaled is called with kind='c'; choose one of 'a', 'b'"),
        (lambda train, x: train.map("environment", x), "has no method 'environment'"),
        (lambda train, x: train.map("forward", x, x), r"called with 2 positional .* none by name.*\(x: object\) -> "),
        (lambda train, x: train.map("scaled", x, faktor=2), r"\['faktor'\] by name, but its signature is scaled.*factor: "),
        (lambda train, x: train.map("pair", x), "pair is called with 1 positional .* missing a required argument: 'y'"),
        (lambda train, x: join(train.map("forward", x), train.map("forward", 3)), "does not depend on the input; pass"),
        (unused, r"the result of node train\[1\].forward is not used; return it, or join\(\) it"),
        (lambda generation, x: generation.map("forward", x).via("nccl"), "'nccl' .* by the generation group; it has shm"),
        (
            lambda train, generation, x: generation.map("forward", train[0].map("forward", x).via("nccl")),
            r"generation\[0\].forward reads train\[0\].forward via 'nccl', which the generation",
        ),
        (lambda train, x: train[0].map("forward", x).via("nccl"), r"\[0\].forward is an output via 'nccl', but the driver"),
        (lambda train, x: train[0:3].map("forward", train.map("forward", x)), "an argument has 4 values for 3 workers"),
        (lambda train, generation, x: train.reduce("total", generation.map("forward", x)), r"'total'\) .* of another role"),
        (lambda train, x: None, "it returns None; return a value from map, reduce or join"),
        (lambda train, x: x, r"it returns Input\(name='x'\); return a value from map"),
        (lambda train, x: train.map("scaled", x, factor=(1, {"a": x})), "'factor': .* contains a value of the replay"),
        (lambda train, x: train.map("pair", x, z=x), r"with 1 positional .* \['z'\] by name, but its signature"),
        (lambda train, x: train.spread("missing", x), "the train worker has no method 'missing'"),
        (lambda train, x: train.map("pair", x, [x]), "train.pair: .* contains a value of the replay; pass that as"),
        (lambda train, x: train.reduce("total", x), r"given .*Input.*, which is not from a map, reduce or join"),
        (lambda train, x: train[4].map("forward", x), r"train\[4\] is outside a shard of 4 workers"),
        (lambda train, x: train[len(train) :].map("forward", x), r"\(4, None, None\) selects none of the 4 train workers"),
    ],
)
def test_mistakes_name_phase_node_and_remedy(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(GraphError, match=f"phase '{function.__name__}'.*{words}"):
        trace(annotated(function), role("train", "nccl", tp=4), role("generation", tp=4))


def test_values_of_another_phase_and_none_and_missing_groups_are_refused() -> None:
    with pytest.raises(GraphError, match="phase 'unused' needs worker groups train; there are actor, critic"):
        trace(unused, role("actor"), role("critic"))
    with pytest.raises(GraphError, match=r"join\(\) needs at least one value"):
        join()
    kept: list[Value] = []

    def first(train: Shard, x: Input) -> Value:
        kept.append(train[0].map("forward", x))
        return kept[0]

    trace(first)
    for function in (
        lambda train, x: train[0].map("forward", kept[0]),
        lambda train, x: join(train[0].map("forward", x), kept[0]),
        lambda train, x: kept[0],
    ):
        with pytest.raises(GraphError, match="which is not from a map, reduce or join of this phase"):
            trace(annotated(function))


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


@pytest.mark.parametrize(
    ("field", "words"),
    [
        *((Field(dtype), f"'lengths' .* has the dtype '{dtype}', which numpy") for dtype in ("int4", "torch.float32")),
        (Field("int64"), r"its inputs is int64 \[rows, tokens\]"),
        (Field("float32", "row"), r"float32 \[rows\]; expected one integer per row"),
    ],
)
def test_fields_that_batches_cannot_have(field: Field, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        phase(inputs={"lengths": field})(broadcast)


@pytest.mark.parametrize("annotation", [Shard, "Shard", "phase.Shard", "dagrl.runtime.phase.Shard"])
def test_shards_are_known_by_their_annotation_however_it_is_imported(annotation: object) -> None:
    def step(workers, value):  # type: ignore[no-untyped-def]
        return workers.map("forward", value)

    step.__annotations__ = {"workers": annotation}
    assert phase(step).roles == ("workers",)
    assert phase(step).input_name == "value"


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


def drawing(item: Phase, **layouts: ParallelLayout) -> Drawing:
    methods = methods_of(Both)
    roles = {name: Role(name, layout, methods, frozenset({"shm", "nccl"})) for name, layout in layouts.items()}
    graph = item.trace(roles, 4)
    return Drawing(graph, layouts, {None: 70_000, **{node.number: 1 << 20 for node in graph.nodes}})


DRAWINGS = [
    [drawing(train_step, train=ParallelLayout())],
    [drawing(train_step, train=ParallelLayout(tp=2))],
    [drawing(train_step, train=ParallelLayout(dp=2, pp=8, tp=8))],
    [drawing(refit, train=ParallelLayout(dp=2, tp=2), generation=ParallelLayout(dp=3, tp=2))],
    [drawing(pipeline, train=ParallelLayout(pp=3))],
    [drawing(outputs, train=ParallelLayout(tp=3)), drawing(pipeline, train=ParallelLayout(pp=2, tp=2))],
]


def expected_edges(item: Drawing) -> Counter[tuple[str, str]]:
    """From the graph itself."""
    read = {(f"n{arg.node}" if isinstance(arg, NodeRef) else "input", f"n{node.number}")
            for node in item.graph.nodes for arg in node.args if not hasattr(arg, "value")}  # fmt: skip
    return Counter(read | {(f"n{number}", "result") for number in item.graph.outputs})


@pytest.mark.parametrize("drawings", DRAWINGS, ids=lambda item: "+".join(each.graph.phase for each in item))
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


# Passes: lists that the driver assembles, and one edge per host however many workers read there.


HEADER = Header("phase", 0, False, {"train": 0}, 10.0)
LIMITS = GraphLimits(1 << 16, 1 << 16, 2, 1.0, 1.0, 1.0)


@phase
def ranks(train: Shard, value):
    return train.map("forward", value)


@phase
def exchange(train: Shard, value):
    """All workers read the first worker's result, and the total of their own results."""
    first = train[0].map("forward", value)
    mine = train.map("pair", value, first)
    total = train.reduce("total", mine)
    return join(train.map("pair", total, first), total)


def evaluated(graph: PhaseGraph, value: object) -> list[PacketBody]:
    """Evaluates a graph symbolically: a result is (method, worker, arguments). Returns the outputs."""
    results: list[object] = []
    for node in graph.nodes:
        args = [
            arg.value if isinstance(arg, Constant) else results[arg.node] if isinstance(arg, NodeRef) else value
            for arg in node.args
        ]
        if node.kind == RELAY:
            results.append(args[0])
        elif node.kind == "collect":
            listed: list[object] = []
            for arg, found in zip(node.args, args, strict=True):
                nested = isinstance(arg, NodeRef) and graph.nodes[arg.node].kind == "collect"
                listed += found if nested and isinstance(found, list) else [found]
            results.append(listed)
        else:
            results.append((node.method, node.worker.position, tuple(args)))
    return [(results[number], 0.0, ()) for number in graph.outputs]


def traced(item: Phase, workers: int, arity: int = 8) -> PhaseGraph:
    return item.trace({"train": Role("train", ParallelLayout(tp=workers), methods_of(Worker))}, arity)


def placed(host_of: Mapping[int, int]) -> Hosts:
    return Hosts({WorkerRef("train", position): f"host{host}" for position, host in host_of.items()}, "host0")


@given(
    item=st.sampled_from([ranks, exchange]),
    host_of=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    arity=st.integers(2, 9),
)
def test_the_results_are_those_of_one_host(item: Phase, host_of: list[int], arity: int) -> None:
    whole = traced(item, len(host_of), arity)
    hosts = placed(dict(enumerate(host_of)))
    gathering = Gathering.of(whole, 1 << 16, hosts)
    graph = with_relays(gathering.graph, hosts)
    graph.validate()
    ((expected, *_),) = evaluated(whole, "input")
    assert gathering.put_together(HEADER, evaluated(graph, "input")).value == expected


@given(host_of=st.lists(st.integers(0, 12), min_size=1, max_size=40), large=st.booleans())
def test_values_cross_to_each_host_once_and_to_few_hosts(host_of: list[int], large: bool) -> None:
    hosts = placed(dict(enumerate(host_of)))
    gathering = Gathering.of(traced(ranks, len(host_of)), 1 << (24 if large else 16), hosts)
    graph = with_relays(gathering.graph, hosts)
    sources: list[tuple[str, int | None]] = [(hosts.driver, None)]
    sources += [(hosts.of[node.worker], node.number) for node in graph.nodes]
    for home, source in sources:
        readers = {node.worker for node in graph.nodes if source in node.sources}
        abroad = [hosts.of[worker] for worker in readers if hosts.of[worker] != home]
        assert len(abroad) == len(set(abroad)) <= FAN_OUT
    far_outputs = [number for number in graph.outputs if hosts.of[graph.nodes[number].worker] != hosts.driver]
    assert len(far_outputs) <= FAN_OUT


def test_on_one_host_nothing_is_added() -> None:
    graph = traced(exchange, 6)
    assert with_relays(graph, placed(dict.fromkeys(range(6), 0))) is graph


def test_relays_take_no_turn_of_their_worker() -> None:
    hosts = placed({0: 0, 1: 1, 2: 1})
    graph = with_relays(Gathering.of(traced(ranks, 3), 1 << 16, hosts).graph, hosts)
    calls = node_calls(graph, LIMITS)
    (relay,) = [call for call in calls if call.kind == RELAY]
    assert relay.position == 1 and not relay.closes_turn
    of_worker = [call for call in calls if call.position == 1 and call.kind != RELAY]
    assert [call.place for call in of_worker] == list(range(len(of_worker)))
    assert [call.closes_turn for call in of_worker] == [False] * (len(of_worker) - 1) + [True]


def test_values_sent_from_gpu_to_gpu_are_not_relayed() -> None:
    hosts = placed({0: 0, 1: 1, 2: 1})
    graph = with_relays(traced(exchange, 3), hosts, direct={0})
    assert not [node for node in graph.nodes if node.kind == RELAY and node.upstream == (0,)]


@pytest.mark.parametrize("hosts", [FAN_OUT + 1, 3 * FAN_OUT, FAN_OUT * FAN_OUT + FAN_OUT])
def test_many_hosts_are_reached_through_a_tree(hosts: int) -> None:
    placement = placed({position: position // 2 + 1 for position in range(2 * hosts)})
    graph = with_relays(traced(ranks, 2 * hosts), placement)
    assert sum(node.kind == RELAY for node in graph.nodes) == hosts
    assert sum(None in node.sources for node in graph.nodes) == FAN_OUT


def largest() -> np.ndarray:
    """A result that is as large as a result may be."""
    found = np.zeros(LIMITS.result_bytes - ENVELOPE_BYTES - payload_bytes(np.zeros(0, np.uint8)), np.uint8)
    assert payload_bytes(found) + ENVELOPE_BYTES == LIMITS.result_bytes
    return found


@pytest.mark.parametrize(("workers", "far"), [(5, 4), (5, 2), (140, 0)], ids=["4", "2", "a tree on one host"])
def test_a_list_has_room_for_all_of_its_results(workers: int, far: int) -> None:
    """Collected on another host, or in a tree on one, a result may be as large as in the driver."""
    hosts = Hosts({WorkerRef("train", at): "far" if at < far else "driver's" for at in range(workers)}, "driver's")
    graph = with_relays(Gathering.of(traced(ranks, workers), LIMITS.result_bytes, hosts).graph, hosts)
    assert any(node.kind == "collect" for node in graph.nodes)
    packets: list[Packet] = []
    for node, call, room in zip(graph.nodes, node_calls(graph, LIMITS), result_rooms(graph, LIMITS), strict=True):
        if node.kind != "collect":
            packets.append(Packet(HEADER, largest()))
            continue
        worker = Worker()
        install(worker, "train", node.worker.position, "")
        packets.append(run_node(worker, dataclasses.replace(call, place=0), *[packets[at] for at in node.upstream]))
        assert packets[-1].failures == ()
        listed = packets[-1].value
        assert isinstance(listed, list) and all(isinstance(item, np.ndarray) for item in listed)
        fits(packets[-1], room, len(listed))
    assert sum(len(packets[at].value) if graph.nodes[at].kind == "collect" else 1 for at in graph.outputs) == workers  # type: ignore[arg-type]


def fits(packet: Packet, room: int, results: int) -> None:
    """Write a packet to an edge of either kind with that room, which is not much more than its results'."""
    parts = dump(packet.wire())
    link = LinkWriter("127.0.0.1", room, 1)
    link.write(parts, 1.0)
    link.close()
    ring = Ring.create(1, room, 1)
    ring.write(parts, 1.0)
    assert results * LIMITS.result_bytes <= room <= results * (LIMITS.result_bytes + ENVELOPE_BYTES)


def test_relays_have_the_room_of_what_they_pass_on() -> None:
    """They read a list, and the input, in a graph whose results are smaller than its input."""

    @phase
    def handed_on(train: Shard, value):
        return train.map("pair", value, join(*[train[at].map("forward", value) for at in range(3)]))

    hosts = Hosts({WorkerRef("train", at): "a" if at < 3 else "b" for at in range(6)}, "a")
    limits = dataclasses.replace(LIMITS, input_bytes=3 << 16)
    graph = with_relays(traced(handed_on, 6), hosts)
    rooms = result_rooms(graph, limits)
    relays = {node.upstream and graph.nodes[node.upstream[0]].kind: node for node in graph.nodes if node.kind == RELAY}
    assert set(relays) == {(), "collect"}
    assert rooms[relays[()].number] == limits.input_bytes
    assert rooms[relays["collect"].number] == rooms[relays["collect"].upstream[0]] >= 3 * limits.result_bytes
    assert {rooms[node.number] for node in graph.nodes if node.kind == "call"} == {limits.result_bytes}


# Lists that the driver assembles.


@phase
def ranks_and_total(train: Shard, value):
    mine = train.map("forward", value)
    return join(mine, train.reduce("total", mine))


def part(value: object, busy_s: float = 0.0) -> PacketBody:
    return value, busy_s, ()


@pytest.mark.parametrize("workers", [2, 3, DRIVER_PARTS])
def test_a_short_list_is_assembled_in_the_driver_in_order(workers: int) -> None:
    gathering = Gathering.of(traced(ranks, workers, arity=2), 1 << 20)
    gathering.graph.validate()
    assert all(node.kind == "call" for node in gathering.graph.nodes)
    positions = [gathering.graph.nodes[number].worker.position for number in gathering.graph.outputs]
    assert positions == list(range(workers))
    listed = gathering.put_together(HEADER, [part(number, number / 10) for number in range(workers)])
    assert listed.value == list(range(workers))
    assert listed.busy_s == (workers - 1) / 10


@pytest.mark.parametrize(
    ("item", "workers", "nbytes", "kinds"),
    [
        (ranks, DRIVER_PARTS + 1, 1 << 20, {"call", "collect"}),
        (ranks, 64, LARGE_BYTES + 1, {"call"}),
        (ranks_and_total, 3, 1 << 20, {"call", "reduce"}),
    ],
    ids=["a long list of small items stays a tree", "large items go to the driver", "reductions stay"],
)
def test_only_lists_that_the_driver_assembles_change(item: Phase, workers: int, nbytes: int, kinds: set[str]) -> None:
    graph = traced(item, workers)
    gathering = Gathering.of(graph, nbytes)
    gathering.graph.validate()
    assert {node.kind for node in gathering.graph.nodes} == kinds
    assert (gathering.graph == graph) == ("collect" in kinds)
    if "collect" in kinds:
        assert gathering.put_together(HEADER, [part([1, 2])]).value == [1, 2]


def test_failures_of_all_items_are_kept_once() -> None:
    failure = WorkerFailure("train", 1, "dp 0", "host", 1, "ranks", 0, "train[1].forward", "raised", "message", "")
    gathering = Gathering.of(traced(ranks, 2), 1 << 20)
    listed = gathering.put_together(HEADER, [part(1), (None, 0.0, (failure,))])
    assert listed.value is None
    assert listed.failures == (failure,)
