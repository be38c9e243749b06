"""Both engines in the driver without Ray: edges, outputs, packets as bytes, teardown and deadlines."""

import functools
import pickle
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from ray.dag import DAGContext
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from dagrl.errors import ConfigError, WorkerFailure
from dagrl.runtime.compile import executor_of
from dagrl.runtime.edges.mailbox import Mailbox
from dagrl.runtime.edges.memory import EdgeClosedError, EdgeLostError, EdgeTimeoutError
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.edges.pickling import UnreadableError, load
from dagrl.runtime.executors import base, dagrl_engine, ray_engine
from dagrl.runtime.executors.base import GraphLimits
from dagrl.runtime.executors.dag import BoundNode, pickled, run_pickled
from dagrl.runtime.executors.dagrl_engine import DagrlGraph, Outputs, Submitted, check_encryption, plan_loops
from dagrl.runtime.executors.eager import EagerGraph
from dagrl.runtime.executors.edge import DRIVER
from dagrl.runtime.executors.node import NodeCall, Take, install
from dagrl.runtime.executors.ray_engine import RayGraph, compile_dag, driver_settings
from dagrl.runtime.graph import InputRef, Node, NodeRef, PhaseGraph, Source, WorkerRef
from dagrl.runtime.passes import Hosts
from dagrl.runtime.shapes import Batch
from tests.unit.runtime.doubles import Unreadable

HEADER = Header("phase", 7, False, {"train": 0}, 10.0)
LIMITS = GraphLimits(1 << 16, 1 << 12, max_in_flight=2, compile_s=5.0, replay_s=7.0, teardown_s=4.0)


class Posted:
    """An edge whose messages are announced in a mailbox; large ones are taken from it one after the other."""

    def __init__(self) -> None:
        self.large: deque[object] = deque()

    def read_message(self, number: int, timeout_s: float) -> object:
        found = self.large.popleft()
        return load(found) if isinstance(found, bytes) else found


def failure(rank: int) -> WorkerFailure:
    return WorkerFailure("train", rank, "", "", rank, "phase", 7, "train.step", "raised", "ValueError", "traceback", rank)


def test_an_output_that_was_read_is_not_read_again() -> None:
    """While another output is late: its writer may be one replay ahead, and a ring gives what comes next."""
    mailbox, near, packet = Mailbox.create(1, 4), Posted(), Packet(HEADER, "other", 0.5)
    late: Any = SimpleNamespace(read=Mock(side_effect=[EdgeTimeoutError("no message in time"), packet, packet]))
    outputs = Outputs([near, late], [0, None], mailbox)  # type: ignore[list-item]
    for number in (1, 2):
        mailbox.post(0, number, pickle.dumps(number), 1.0)
        near.large.append((f"near {number}", 0.1, (failure(0),) if number == 1 else ()))
    with pytest.raises(EdgeTimeoutError):
        outputs.read(Submitted(1, HEADER), 1.0)
    assert outputs.failures(Submitted(1, HEADER)) == [failure(0)]
    assert outputs.failures(Submitted(1, HEADER)) == [failure(0)]
    assert [value for value, *_ in outputs.read(Submitted(1, HEADER), 1.0)] == ["near 1", "other"]
    assert [value for value, *_ in outputs.read(Submitted(2, HEADER), 1.0)] == ["near 2", "other"]


def test_failures_are_seen_before_the_other_workers_have_answered() -> None:
    """Small and large messages; repeated looks find the same failures."""
    mailbox = Mailbox.create(4, 4)
    edges = [Posted() for _ in range(4)]
    outputs = Outputs(edges, range(4), mailbox)  # type: ignore[arg-type]
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
    mailbox, edge, content = Mailbox.create(1, 4), Posted(), pickle.dumps((Unreadable(), 0.1, ()))
    mailbox.post(0, 1, pickle.dumps(1) if large else content, 1.0)
    edge.large.append(content)
    with pytest.raises(UnreadableError, match="ValueError: cannot be made again"):
        Outputs([edge], [0], mailbox).read(Submitted(1, HEADER), 1.0)  # type: ignore[list-item]


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
        self.kill, self.monotonic, self.is_initialized = self.killed.append, lambda: self.now, lambda: True

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


def live_graph(monkeypatch: pytest.MonkeyPatch, rays: Rays, read: Exception | None = None, may_kill: bool = True) -> Any:
    """A graph on these actors, whose outputs raise `read`."""
    for module in (dagrl_engine, base):
        monkeypatch.setattr(module, "ray", rays)
    monkeypatch.setattr(dagrl_engine, "time", rays)
    graph: Any = DagrlGraph.__new__(DagrlGraph)
    graph._phase, graph._submitted, graph._ask_at, graph._alive = "train_step", 0, 0.0, {}
    graph._limits, graph._call = replace(LIMITS, may_kill=may_kill), rays.ask
    graph._start = graph._outputs = SimpleNamespace(write=Mock(), read=Mock(side_effect=read), close=lambda: None)
    graph._closing, graph._bound = [graph._start], SimpleNamespace(actors=tuple(rays.answers), gathering=None)
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


CALL = NodeCall("train", "train[3].step", 0, "call", "step", (Take(0),), {}, 0, True, 1 << 20, "key")
TIMEOUT_S = 4.0
RAY_LIMITS = GraphLimits(1 << 16, 1 << 16, max_in_flight=2, compile_s=0.05, replay_s=1.0, teardown_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("engine", "transport", "runs"), [("dagrl", "shm", "dagrl"), ("ray", "shm", "ray"), ("dagrl", "nccl", "ray")]
)
def test_accelerator_edges_run_by_ray(monkeypatch: pytest.MonkeyPatch, engine: Any, transport: str, runs: str) -> None:
    first = Node(0, WorkerRef("train", 0), "step", "call", (InputRef(),), transport=transport)
    graph = PhaseGraph("phase", {"train": 2}, (first, Node(1, WorkerRef("train", 1), "step", "call", (NodeRef(0),))), (1,))
    for name in ("dagrl", "ray"):
        made = f"dagrl.runtime.executors.{name}_engine.{name.capitalize()}Graph"
        monkeypatch.setattr(made, lambda *given, name=name: name)
    executor: Any = executor_of("compiled", engine)
    assert executor(graph, {}, {}, RAY_LIMITS) == runs
    eager = executor_of("eager", engine)
    assert isinstance(eager, functools.partial) and eager.func is EagerGraph


@pytest.fixture
def worker() -> Any:
    worker = SimpleNamespace(step=Mock(return_value="done"), abort=Mock())
    install(worker, "train", 3, "dp 3")
    return worker


def test_values_and_results_are_copies_that_may_be_kept(worker: Any) -> None:
    batch = Batch({"x": np.arange(6).reshape(2, 3), "lengths": np.full(2, 3)})
    worker.step.return_value = {"x": np.arange(4.0)}
    result = Packet.from_wire(load(run_pickled(worker, CALL, pickled(Packet(HEADER, batch)))))
    (seen,) = worker.step.call_args.args
    np.testing.assert_array_equal(seen["x"], batch["x"])
    assert isinstance(result.value, dict) and result.header == HEADER and not result.failures
    np.testing.assert_array_equal(result.value["x"], np.arange(4.0))


def test_a_value_that_cannot_be_unpickled_frees_the_workers_peers(worker: Any) -> None:
    with pytest.raises(UnreadableError, match="cannot be made again"):
        run_pickled(worker, CALL, pickled(Packet(HEADER, Unreadable())))
    assert worker.abort.call_count == 1


def test_a_result_for_an_accelerator_is_not_pickled(worker: Any) -> None:
    packet = run_pickled(worker, replace(CALL, accelerated=True), pickled(Packet(HEADER, 0)))
    assert isinstance(packet, Packet) and packet.value == "done"


class Clock:
    """Time that passes in waits alone, of which `waited` are the lengths; a thread ends at the first time in `ends`."""

    def __init__(self, ends: float) -> None:
        self.now, self.ends, self.waited = 100.0, 100.0 + ends, list[float]()
        self.monotonic = lambda: self.now

    def thread(self, target: Callable[[], None], name: str, daemon: bool) -> Any:
        return SimpleNamespace(start=target, join=self.join, is_alive=lambda: self.now < self.ends)

    def join(self, timeout: float) -> None:
        self.waited.append(timeout)
        self.now = min(self.now + timeout, max(self.now, self.ends))


@pytest.mark.parametrize(
    ("ends", "running", "may_kill", "killed"),
    [
        (0.5, ["a"], True, []),
        (3.5, ["b"], True, ["b"]),
        (60.0, ["b"], True, ["b"]),
        (60.0, [], True, []),
        (60.0, ["a"], False, []),
    ],
    ids=["stops", "stops once killed", "never stops", "busy elsewhere", "not ours"],
)
def test_teardown_kills_workers_with_running_loops_within_the_deadline(
    monkeypatch: pytest.MonkeyPatch, ends: float, running: list[str], may_kill: bool, killed: list[str]
) -> None:
    clock, found = Clock(ends), list[str]()
    monkeypatch.setattr(ray_engine, "time", clock)
    monkeypatch.setattr(ray_engine, "threading", SimpleNamespace(Thread=clock.thread))
    monkeypatch.setattr(base, "ray", SimpleNamespace(kill=found.append))
    graph: Any = RayGraph.__new__(RayGraph)
    graph._phase, graph._limits, graph._running = "train_step", replace(RAY_LIMITS, may_kill=may_kill), lambda _: running
    graph._dag, graph._unread = SimpleNamespace(teardown=lambda: None), SimpleNamespace(put=lambda item: None)
    graph.teardown(TIMEOUT_S)
    assert found == killed
    assert sum(clock.waited) <= TIMEOUT_S and clock.now <= 100.0 + min(ends, TIMEOUT_S) + 1e-6


def test_a_graph_that_is_compiled_after_its_deadline_is_given_back() -> None:
    go_on, given_back = threading.Event(), threading.Event()

    def compile_() -> Any:
        assert go_on.wait(60.0)
        return SimpleNamespace(teardown=given_back.set)

    bound: Any = SimpleNamespace(phase="train_step", dag=SimpleNamespace(experimental_compile=compile_))
    with pytest.raises(TimeoutError, match=r"not compiled it within compile_s = 0\.05 s"):
        compile_dag(bound, RAY_LIMITS)
    go_on.set()
    assert given_back.wait(60.0), "its workers' threads are free for another one"


def test_settings_of_a_graph_are_rays_while_it_is_compiled() -> None:
    before = asdict(DAGContext.get_current())
    with driver_settings(RAY_LIMITS):
        found = DAGContext.get_current()
        assert found.max_inflight_executions == found.max_buffered_results == 2
        assert found.buffer_size_bytes > RAY_LIMITS.input_bytes
    assert asdict(DAGContext.get_current()) == before
