"""Which engine runs compiled graphs, and packets as bytes in Ray's engine."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dagrl.runtime import compile as compile_module
from dagrl.runtime.compile import executor_of
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.edges.pickling import dump, load
from dagrl.runtime.executors import ray_dag
from dagrl.runtime.executors.compiled import compile_graph
from dagrl.runtime.executors.eager import EagerGraph
from dagrl.runtime.executors.node import NodeCall, Take, install
from dagrl.runtime.executors.ray_engine import PickledCall, RayGraph, run_pickled
from dagrl.runtime.shapes import Batch
from tests.unit.runtime.unreadable import unreadable


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Each test looks at Ray again, and so does what comes after."""
    for cached in (ray_dag.unknown_parts, compile_module._warn_of_unknown_parts):
        cached.cache_clear()
    yield
    for cached in (ray_dag.unknown_parts, compile_module._warn_of_unknown_parts):
        cached.cache_clear()


def test_each_engine_has_its_executor(caplog: pytest.LogCaptureFixture) -> None:
    assert [executor_of("compiled", "dagrl"), executor_of("compiled", "ray")] == [compile_graph, RayGraph]
    for engine in ("dagrl", "ray"):
        eager = executor_of("eager", engine)
        assert isinstance(eager, functools.partial) and eager.func is EagerGraph
    assert not caplog.records


def changed_loop(self: object, tasks: object, schedule: object, overlap: bool, streams: object) -> None:
    """A loop with one more parameter."""


@pytest.mark.parametrize(
    ("part", "found", "named"),
    [
        ("ray.dag.compiled_dag_node.do_exec_tasks", changed_loop, "do_exec_tasks"),
        ("ray.dag.compiled_dag_node.CompiledDAG.DAGDriverProxyActor", None, "DAGDriverProxyActor"),
        ("ray.experimental.channel.ChannelOutputType.create_channel", changed_loop, "create_channel"),
    ],
)
def test_a_ray_whose_private_parts_are_unknown_uses_its_own_engine_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str, found: object, named: str
) -> None:
    monkeypatch.setattr(part, found)
    with caplog.at_level(logging.WARNING, "dagrl"):
        assert [executor_of("compiled", "dagrl") for _ in range(3)] == [RayGraph] * 3
    (warning,) = caplog.records
    assert named in warning.getMessage() and "docs/runtime.md" in warning.getMessage()


class Worker:
    """Takes and returns what the test gives it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.returns: Any = "done"

    def step(self, value: Any) -> Any:
        self.seen.append(value)
        return self.returns


HEADER = Header("phase", 0, False, {"train": 0}, 10.0)
CALL = PickledCall(
    NodeCall("train", "train[3].step", 0, "call", "step", (Take(0),), {}, 0, True, 1 << 20, "key"), pickles=True
)


@pytest.fixture
def worker() -> Worker:
    worker = Worker()
    install(worker, "train", 3, "dp 3")
    return worker


def run(worker: Worker, value: object, call: PickledCall = CALL) -> Any:
    return run_pickled(worker, call, bytes(dump(Packet(HEADER, value).wire(), in_band=True)[0]))


def test_values_and_results_are_copies_that_may_be_kept(worker: Worker) -> None:
    batch = Batch({"x": np.arange(6).reshape(2, 3), "lengths": np.full(2, 3)})
    worker.returns = {"x": np.arange(4.0)}
    result = Packet.from_wire(load(run(worker, batch)))
    (seen,) = worker.seen
    np.testing.assert_array_equal(seen["x"], batch["x"])
    assert isinstance(result.value, dict) and result.header == HEADER and not result.failures
    np.testing.assert_array_equal(result.value["x"], np.arange(4.0))


@pytest.mark.parametrize(
    ("value", "returns", "message"),
    [
        (unreadable(), "done", "UnreadableError: ValueError: cannot be made again"),
        (0, SimpleNamespace(lock=threading.Lock()), "cannot pickle '_thread.lock' object"),
    ],
    ids=["read", "written"],
)
def test_a_value_that_cannot_be_pickled_or_unpickled_is_a_failure_of_its_worker(
    worker: Worker, value: object, returns: object, message: str
) -> None:
    worker.returns = returns
    (failure,) = Packet.from_wire(load(run(worker, value))).failures
    assert (failure.role, failure.rank, failure.node) == ("train", 3, "train[3].step")
    assert message in failure.message


def test_a_result_for_an_accelerator_is_not_pickled(worker: Worker) -> None:
    packet = run(worker, 0, replace(CALL, pickles=False))
    assert isinstance(packet, Packet) and packet.value == "done"
