"""dagrl's engine in the driver: the plan of a graph's edges, its outputs, and teardown within one deadline; without Ray."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from dagrl.errors import ConfigError, WorkerFailure
from dagrl.runtime.edges.mailbox import Mailbox
from dagrl.runtime.edges.memory import EdgeClosedError, EdgeLostError, EdgeTimeoutError
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.edges.pickling import UnreadableError, load
from dagrl.runtime.executors import base, dagrl_engine
from dagrl.runtime.executors.base import GraphLimits
from dagrl.runtime.executors.dag import BoundNode
from dagrl.runtime.executors.dagrl_engine import DagrlGraph, Outputs, Submitted, check_encryption, plan_loops
from dagrl.runtime.executors.edge import DRIVER
from dagrl.runtime.executors.node import NodeCall
from dagrl.runtime.graph import Source, WorkerRef
from dagrl.runtime.passes.hosts import Hosts
from tests.unit.runtime.unreadable import Unreadable

HEADER = Header("phase", 7, False, {"train": 0}, 10.0)
LIMITS = GraphLimits(1 << 16, 1 << 12, max_in_flight=2, compile_s=5.0, replay_s=7.0, teardown_s=4.0)


class Posted:
    """An edge whose messages are announced in a mailbox; large ones are taken from it one after the other."""

    def __init__(self) -> None:
        self.large: deque[object] = deque()

    def read_message(self, number: int, timeout_s: float) -> object:
        found = self.large.popleft()
        return load(found) if isinstance(found, bytes) else found


class Other:
    """An edge that is read by itself, and has nothing to read the first time."""

    def __init__(self) -> None:
        self.late = 1

    def read(self, timeout_s: float) -> Packet:
        if self.late:
            self.late -= 1
            raise EdgeTimeoutError("no message in time")
        return Packet(HEADER, "other", 0.5)


def outputs_of(edges: list[Any], mailbox: Mailbox, cells: list[int | None] | None = None) -> Outputs:
    """Outputs that are posted in this order, or have these cells."""
    return Outputs(edges, list(range(len(edges))) if cells is None else cells, mailbox)


def test_a_read_that_timed_out_finds_everything_the_next_time() -> None:
    mailbox = Mailbox.create(2, 4)
    large = Posted()
    outputs = outputs_of([large, Other(), Posted()], mailbox, [1, None, 0])
    mailbox.post(0, 1, pickle.dumps(("small", 0.1, ())), 1.0)
    mailbox.post(1, 1, pickle.dumps(1), 1.0)
    large.large.append(("large", 0.2, ()))
    with pytest.raises(EdgeTimeoutError):
        outputs.read(Submitted(1, HEADER), 1.0)
    found = outputs.read(Submitted(1, HEADER), 1.0)
    assert [value for value, *_ in found] == ["large", "other", "small"]


def test_an_output_that_was_read_is_not_read_again() -> None:
    """While another output is late: its writer may be one replay ahead, and a ring gives what comes next."""
    mailbox = Mailbox.create(1, 4)
    near = Posted()
    outputs = outputs_of([near, Other()], mailbox, [0, None])
    failure = WorkerFailure("train", 0, "", "", 1, "step", 1, "train.step", "raised", "ValueError", "", 0)
    for number in (1, 2):
        mailbox.post(0, number, pickle.dumps(number), 1.0)
        near.large.append((f"near {number}", 0.1, (failure,) if number == 1 else ()))
    with pytest.raises(EdgeTimeoutError):
        outputs.read(Submitted(1, HEADER), 1.0)
    assert outputs.failures(Submitted(1, HEADER)) == [failure]
    assert outputs.failures(Submitted(1, HEADER)) == [failure]
    assert [value for value, *_ in outputs.read(Submitted(1, HEADER), 1.0)] == ["near 1", "other"]
    assert [value for value, *_ in outputs.read(Submitted(2, HEADER), 1.0)] == ["near 2", "other"]


def failure(rank: int) -> WorkerFailure:
    return WorkerFailure("train", rank, "", "", rank, "phase", 7, "train.step", "raised", "ValueError", "traceback", rank)


def test_failures_are_seen_before_the_other_workers_have_answered() -> None:
    """Small and large messages; repeated looks find the same failures."""
    mailbox = Mailbox.create(4, 4)
    edges = [Posted() for _ in range(4)]
    outputs = outputs_of(edges, mailbox)
    assert outputs.failures(Submitted(1, HEADER)) == []
    mailbox.post(1, 1, pickle.dumps((None, 0.1, (failure(1),))), 1.0)
    mailbox.post(3, 1, pickle.dumps(1), 1.0)
    edges[3].large.append((None, 0.1, (failure(3),)))
    mailbox.post(0, 1, pickle.dumps(("fine", 0.1, ())), 1.0)
    for _ in range(2):
        with pytest.raises(EdgeTimeoutError):
            outputs.read(Submitted(1, HEADER), 0.01)
        assert outputs.failures(Submitted(1, HEADER)) == [failure(1), failure(3)]
    mailbox.post(2, 1, pickle.dumps(("late", 0.1, ())), 1.0)
    assert [part[0] for part in outputs.read(Submitted(1, HEADER), 1.0)] == ["fine", None, "late", None]
    assert outputs.failures(Submitted(2, HEADER)) == []


@pytest.mark.parametrize("large", [False, True])
def test_a_result_that_cannot_be_unpickled_is_an_error(large: bool) -> None:
    mailbox, edges, content = Mailbox.create(1, 4), [Posted()], pickle.dumps((Unreadable(), 0.1, ()))
    mailbox.post(0, 1, pickle.dumps(1) if large else content, 1.0)
    edges[0].large.append(content)
    with pytest.raises(UnreadableError, match="ValueError: cannot be made again"):
        outputs_of(edges, mailbox).read(Submitted(1, HEADER), 1.0)


def node(number: int, *sources: Source) -> BoundNode:
    call = NodeCall("train", f"train[{number}].step", number, "map", "step", (), {}, 0, True, 1 << 10, "", number=number)
    return BoundNode(call, sources)


def test_readers_are_told_apart_by_where_they_are() -> None:
    """The writer itself, workers on its host, and on another one. Only edges that the driver alone reads have a cell."""
    hosts = {0: "here", 1: "here", 2: "there", DRIVER: "here"}
    nodes = [node(0, None), node(1, 0), node(2, 0), node(3, 0), node(4, 1), node(5, 2)]
    plan = plan_loops(nodes, [0, 0, 1, 2, 0, 1], hosts, [3, 4, 5], LIMITS)
    assert [[one.call.number for one in mine] for mine in plan.loops] == [[0, 1, 4], [2, 5], [3]]
    edges = {one.call.number: one.edge for mine in plan.loops for one in mine}
    assert (plan.start.near, plan.start.far, plan.start.slot_bytes) == ((0,), (), LIMITS.input_bytes)
    assert (edges[0].near, edges[0].far, edges[0].cell) == ((1,), (2,), None)
    assert (edges[1].near, edges[1].far) == ((), ())
    assert (edges[3].near, edges[3].far, edges[3].cell) == ((), (DRIVER,), None)
    assert (edges[4].near, edges[4].cell, edges[5].cell, plan.cells) == ((DRIVER,), 0, 1, (None, 0, 1))
    assert {edge.slot_bytes for edge in edges.values()} == {1 << 10}


class Rays:
    """Stands for Ray: `end_loop` on each actor answers with what is next in its list (the last one again), or not at all."""

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self.answers, self.now, self.killed = answers, 100.0, list[str]()

    def ask(self, actor: str, function: Callable[..., object], *args: object) -> tuple[str, object]:
        found = self.answers[actor]
        return actor, (found.pop(0) if len(found) > 1 else found[0]) if found else self

    def wait(self, refs: list[Any], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        ready = [ref for ref in refs if ref[1] is not self][:num_returns]
        if len(ready) < num_returns and timeout is not None:
            self.now += timeout
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Any) -> object:
        if isinstance(ref[1], RayError):
            raise ref[1]
        return ref[1]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def is_initialized(self) -> bool:
        return True

    def kill(self, actor: str) -> None:
        self.killed.append(actor)


def live_graph(monkeypatch: pytest.MonkeyPatch, rays: Rays, read: Exception | None = None, may_kill: bool = True) -> Any:
    """A graph on these actors, whose outputs raise `read`."""
    for module in (dagrl_engine, base):
        monkeypatch.setattr(module, "ray", rays)
    monkeypatch.setattr(dagrl_engine, "time", rays)
    graph = DagrlGraph.__new__(DagrlGraph)

    def raise_it(*words: object) -> None:
        if read is not None:
            raise read

    graph._phase, graph._limits, graph._submitted, graph._ask_at, graph._alive = "train_step", LIMITS, 0, 0.0, {}
    graph._limits = GraphLimits(1 << 16, 1 << 12, 2, 5.0, 7.0, 4.0, may_kill=may_kill)
    edges: Any = SimpleNamespace(write=raise_it, read=raise_it, close=lambda: None)
    graph._start = graph._outputs = edges
    graph._closing = [edges]
    bound: Any = SimpleNamespace(actors=tuple(rays.answers), gathering=None)
    graph._bound = bound
    monkeypatch.setattr(graph, "_call", rays.ask)
    return graph


def lost(time_ns: int, text: str) -> RayTaskError:
    cause = EdgeLostError(text)
    cause.time_ns = time_ns  # type: ignore[attr-defined]
    return RayTaskError("loop", "", cause)


@pytest.mark.parametrize(
    ("ends", "error", "text"),
    [
        ({"a": [True], "b": [lost(2, "by teardown")], "c": [lost(1, "the cause")]}, EdgeLostError, "the cause"),
        ({"a": [False, True], "b": [RayTaskError("loop", "of our own", ValueError())]}, RayTaskError, "of our own"),
        ({"b": [lost(1, "lost")], "c": [ActorDiedError()]}, ActorDiedError, "died"),
        ({"a": [True], "b": [False, False, True]}, EdgeClosedError, "an edge was closed"),
    ],
    ids=["first link", "own error", "death", "no error"],
)
def test_the_cause_of_a_graphs_end_is_raised_deaths_first(
    monkeypatch: pytest.MonkeyPatch, ends: dict[str, list[Any]], error: type[Exception], text: str
) -> None:
    graph = live_graph(monkeypatch, Rays(ends), EdgeClosedError("an edge was closed"))
    with pytest.raises(error, match=text):
        graph.fetch(Submitted(1, HEADER), 3.0)


def test_a_waiting_driver_notices_deaths_but_not_busy_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    rays = Rays({"a": [True], "busy": [], "unreachable": [ActorUnavailableError("", None)], "b": [True, ActorDiedError()]})
    graph = live_graph(monkeypatch, rays, EdgeTimeoutError("empty"))
    with pytest.raises(TimeoutError, match="empty"):
        graph.fetch(Submitted(1, HEADER), 0.1)
    with pytest.raises(TimeoutError, match="empty"):  # too soon to ask again
        graph.fetch(Submitted(1, HEADER), 0.1)
    rays.now += 1.0
    with pytest.raises(ActorDiedError):
        graph.fetch(Submitted(1, HEADER), 0.1)


STAY = {"a": [False, True], "b": [False], "c": [], "died": [ActorDiedError()]}


@pytest.mark.parametrize(
    ("answers", "may_kill", "killed", "until"),
    [(STAY, True, ["b", "c"], 104.0), (STAY, False, [], 104.0), ({"a": [True], "b": [False, False, True]}, True, [], 100.5)],
    ids=["some stay", "not ours", "all stop"],
)
def test_teardown_kills_own_workers_with_running_loops_within_the_deadline(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[Any]], may_kill: bool, killed: list[str], until: float
) -> None:
    rays = Rays({actor: list(given) for actor, given in answers.items()})
    live_graph(monkeypatch, rays, may_kill=may_kill).teardown(4.0)
    assert sorted(rays.killed) == killed and rays.now <= until


def test_edges_to_other_hosts_are_refused_where_ray_encrypts(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = WorkerRef("train", 0)
    one, two = Hosts({worker: "here"}, "here"), Hosts({worker: "there"}, "here")
    check_encryption(two)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    check_encryption(one)
    with pytest.raises(ConfigError, match=r"samples and metrics between hosts in plain text.*executor_cfg\.engine=ray"):
        check_encryption(two)
