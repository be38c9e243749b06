"""Graph passes: lists that the driver assembles, and one edge per host however many workers read there."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dagrl.errors import WorkerFailure
from dagrl.runtime.edges.link import LinkWriter
from dagrl.runtime.edges.packet import ENVELOPE_BYTES, Header, Packet, PacketBody, payload_bytes
from dagrl.runtime.edges.pickling import dump
from dagrl.runtime.edges.ring import Ring
from dagrl.runtime.executors.base import GraphLimits, node_calls, result_rooms
from dagrl.runtime.executors.node import install, run_node
from dagrl.runtime.graph import Constant, NodeRef, PhaseGraph, WorkerRef
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.passes import DRIVER_PARTS, FAN_OUT, LARGE_BYTES, RELAY, Gathering, Hosts, with_relays
from dagrl.runtime.phase import Phase, Role, Shard, join, methods_of, phase

HEADER = Header("phase", 0, False, {"train": 0}, 10.0)
LIMITS = GraphLimits(1 << 16, 1 << 16, 2, 1.0, 1.0, 1.0)


class Worker:
    def rank(self, value: object) -> object: ...
    def total(self, parts: list[object]) -> object: ...
    def both(self, one: object, other: object) -> object: ...


@phase
def ranks(train: Shard, value):
    return train.map("rank", value)


@phase
def exchange(train: Shard, value):
    """All workers read the first worker's result, and the total of their own results."""
    first = train[0].map("rank", value)
    mine = train.map("both", value, first)
    total = train.reduce("total", mine)
    return join(train.map("both", total, first), total)


def run(graph: PhaseGraph, value: object) -> list[PacketBody]:
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
    ((expected, *_),) = run(whole, "input")
    assert gathering.put_together(HEADER, run(graph, "input")).value == expected


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
        return train.map("both", value, join(*[train[at].map("rank", value) for at in range(3)]))

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
    mine = train.map("rank", value)
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
    failure = WorkerFailure("train", 1, "dp 0", "host", 1, "ranks", 0, "train[1].rank", "raised", "message", "")
    gathering = Gathering.of(traced(ranks, 2), 1 << 20)
    listed = gathering.put_together(HEADER, [part(1), (None, 0.0, (failure,))])
    assert listed.value is None
    assert listed.failures == (failure,)
