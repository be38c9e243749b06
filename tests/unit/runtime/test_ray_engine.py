"""Which engine runs a graph, packets as bytes in Ray's engine, its teardown and its compile deadline; without Ray."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.dag import DAGContext

from dagrl.runtime.compile import executor_of
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.edges.pickling import UnreadableError, load
from dagrl.runtime.executors import base, ray_engine
from dagrl.runtime.executors.base import GraphLimits
from dagrl.runtime.executors.dag import pickled, run_pickled
from dagrl.runtime.executors.eager import EagerGraph
from dagrl.runtime.executors.node import NodeCall, Take, install
from dagrl.runtime.executors.ray_engine import RayGraph, compile_dag, driver_settings
from dagrl.runtime.graph import InputRef, Node, NodeRef, PhaseGraph, WorkerRef
from dagrl.runtime.shapes import Batch
from tests.unit.runtime.unreadable import Unreadable

HEADER = Header("phase", 0, False, {"train": 0}, 10.0)
CALL = NodeCall("train", "train[3].step", 0, "call", "step", (Take(0),), {}, 0, True, 1 << 20, "key")
TIMEOUT_S = 4.0
LIMITS = GraphLimits(1 << 16, 1 << 16, max_in_flight=2, compile_s=0.05, replay_s=1.0, teardown_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("engine", "transport", "runs"), [("dagrl", "shm", "dagrl"), ("ray", "shm", "ray"), ("dagrl", "nccl", "ray")]
)
def test_graphs_with_accelerator_edges_run_on_rays_engine(
    monkeypatch: pytest.MonkeyPatch, engine: Any, transport: str, runs: str
) -> None:
    first = Node(0, WorkerRef("train", 0), "step", "call", (InputRef(),), transport=transport)
    graph = PhaseGraph("phase", {"train": 2}, (first, Node(1, WorkerRef("train", 1), "step", "call", (NodeRef(0),))), (1,))
    for name in ("dagrl", "ray"):
        made = f"dagrl.runtime.executors.{name}_engine.{name.capitalize()}Graph"
        monkeypatch.setattr(made, lambda *given, name=name: name)
    executor: Any = executor_of("compiled", engine)
    assert executor(graph, {}, {}, LIMITS) == runs
    eager = executor_of("eager", engine)
    assert isinstance(eager, functools.partial) and eager.func is EagerGraph


class Worker:
    """Takes and returns what the test gives it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.returns: Any = "done"
        self.aborted = 0

    def step(self, value: Any) -> Any:
        self.seen.append(value)
        return self.returns

    def abort(self) -> None:
        self.aborted += 1


@pytest.fixture
def worker() -> Worker:
    worker = Worker()
    install(worker, "train", 3, "dp 3")
    return worker


def test_values_and_results_are_copies_that_may_be_kept(worker: Worker) -> None:
    batch = Batch({"x": np.arange(6).reshape(2, 3), "lengths": np.full(2, 3)})
    worker.returns = {"x": np.arange(4.0)}
    result = Packet.from_wire(load(run_pickled(worker, CALL, pickled(Packet(HEADER, batch)))))
    (seen,) = worker.seen
    np.testing.assert_array_equal(seen["x"], batch["x"])
    assert isinstance(result.value, dict) and result.header == HEADER and not result.failures
    np.testing.assert_array_equal(result.value["x"], np.arange(4.0))


def test_a_value_that_cannot_be_pickled_is_a_failure_of_its_worker(worker: Worker) -> None:
    worker.returns = SimpleNamespace(lock=threading.Lock())
    (failure,) = Packet.from_wire(load(run_pickled(worker, CALL, pickled(Packet(HEADER, 0))))).failures
    assert (failure.role, failure.rank, failure.node) == ("train", 3, "train[3].step")
    assert "cannot pickle '_thread.lock' object" in failure.message


def test_a_value_that_cannot_be_unpickled_frees_the_workers_peers(worker: Worker) -> None:
    with pytest.raises(UnreadableError, match="cannot be made again"):
        run_pickled(worker, CALL, pickled(Packet(HEADER, Unreadable())))
    assert worker.aborted == 1


def test_a_result_for_an_accelerator_is_not_pickled(worker: Worker) -> None:
    packet = run_pickled(worker, replace(CALL, accelerated=True), pickled(Packet(HEADER, 0)))
    assert isinstance(packet, Packet) and packet.value == "done"


class Clock:
    """Time that passes in waits alone, of which `waited` are the lengths; a thread ends at the first time in `ends`."""

    def __init__(self, ends: float) -> None:
        self.now, self.ends, self.waited = 100.0, 100.0 + ends, list[float]()

    def monotonic(self) -> float:
        return self.now

    def thread(self, target: Callable[[], None], name: str, daemon: bool) -> Any:
        return SimpleNamespace(start=target, join=self.join, is_alive=lambda: self.now < self.ends)

    def join(self, timeout: float) -> None:
        self.waited.append(timeout)
        self.now = min(self.now + timeout, max(self.now, self.ends))


def torn_down(monkeypatch: pytest.MonkeyPatch, clock: Clock, running: Sequence[str], may_kill: bool = True) -> list[str]:
    """The actors that a teardown kills, after `clock` has counted its waits."""
    killed = list[str]()
    monkeypatch.setattr(ray_engine, "time", clock)
    monkeypatch.setattr(ray_engine, "threading", SimpleNamespace(Thread=clock.thread))
    monkeypatch.setattr(base, "ray", SimpleNamespace(kill=killed.append))
    graph: Any = RayGraph.__new__(RayGraph)
    graph._phase, graph._limits = "train_step", replace(LIMITS, may_kill=may_kill)
    graph._dag, graph._unread = SimpleNamespace(teardown=lambda: None), SimpleNamespace(put=lambda item: None)
    monkeypatch.setattr(graph, "_running", lambda seconds: list(running))
    graph.teardown(TIMEOUT_S)
    return killed


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
    clock = Clock(ends)
    assert torn_down(monkeypatch, clock, running, may_kill) == killed
    assert sum(clock.waited) <= TIMEOUT_S and clock.now <= 100.0 + min(ends, TIMEOUT_S) + 1e-6


def test_a_graph_that_is_compiled_after_its_deadline_is_given_back() -> None:
    go_on, given_back = threading.Event(), threading.Event()

    def compile_() -> Any:
        assert go_on.wait(60.0)
        return SimpleNamespace(teardown=given_back.set)

    bound: Any = SimpleNamespace(phase="train_step", dag=SimpleNamespace(experimental_compile=compile_))
    with pytest.raises(TimeoutError, match=r"not compiled it within compile_s = 0\.05 s"):
        compile_dag(bound, LIMITS)
    go_on.set()
    assert given_back.wait(60.0), "its workers' threads are free for another one"


def test_settings_of_a_graph_are_rays_while_it_is_compiled() -> None:
    before = asdict(DAGContext.get_current())
    with driver_settings(LIMITS):
        found = DAGContext.get_current()
        assert found.max_inflight_executions == found.max_buffered_results == 2
        assert found.buffer_size_bytes > LIMITS.input_bytes
    assert asdict(DAGContext.get_current()) == before
