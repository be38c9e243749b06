"""Teardown of a compiled graph: one deadline for all waits; only workers whose loops keep running are killed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dagrl.runtime.executors import compiled, ray_dag
from dagrl.runtime.executors.base import GraphLimits
from dagrl.runtime.executors.compiled import CompiledGraph

TIMEOUT_S = 4.0
LIMITS = GraphLimits(1 << 16, 1 << 16, max_in_flight=2, compile_s=0.05, replay_s=1.0, teardown_s=TIMEOUT_S)


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
    monkeypatch.setattr(ray_dag, "time", clock)
    monkeypatch.setattr(ray_dag, "threading", SimpleNamespace(Thread=clock.thread))
    monkeypatch.setattr(ray_dag, "ray", SimpleNamespace(kill=killed.append))
    limits = replace(LIMITS, may_kill=may_kill)
    ray_dag.teardown_dag(lambda: None, "train_step", limits, lambda seconds: list(running), TIMEOUT_S)
    return killed


def test_a_graph_that_stops_is_waited_for_once_and_nobody_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(ends=0.5)
    assert torn_down(monkeypatch, clock, ["a"]) == []
    assert clock.now == 100.5


@pytest.mark.parametrize("ends", [3.5, 60.0])
def test_workers_whose_loops_go_on_are_killed_within_the_one_deadline(monkeypatch: pytest.MonkeyPatch, ends: float) -> None:
    clock = Clock(ends)
    assert torn_down(monkeypatch, clock, ["b"]) == ["b"]
    assert clock.waited[0] < TIMEOUT_S and sum(clock.waited) <= TIMEOUT_S
    assert clock.now == pytest.approx(100.0 + min(ends, TIMEOUT_S))


@pytest.mark.parametrize(("running", "may_kill"), [([], True), (["a"], False)])
def test_who_is_busy_elsewhere_or_not_ours_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, running: list[str], may_kill: bool
) -> None:
    clock = Clock(ends=60.0)
    assert torn_down(monkeypatch, clock, running, may_kill) == []
    assert sum(clock.waited) <= TIMEOUT_S


def test_only_workers_whose_loops_go_on_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(loops: list[str], num_returns: int, timeout: float | None) -> tuple[list[str], list[str]]:
        waited.append(timeout)
        ended = [loop for loop in loops if loop.startswith("ended")][:num_returns]
        return ended, [loop for loop in loops if loop not in ended]

    killed, waited = list[str](), list[float | None]()
    hangs = threading.Event()
    loops = {"a": "ended 1", "b": "goes on", "c": "ended 2"}
    dag = SimpleNamespace(worker_task_refs=loops, teardown=lambda: hangs.wait(60.0))
    rays = SimpleNamespace(wait=wait, get=lambda answers, timeout: answers, is_initialized=lambda: False)
    monkeypatch.setattr(compiled, "ray", rays)
    monkeypatch.setattr(ray_dag, "ray", SimpleNamespace(kill=killed.append))
    monkeypatch.setattr(compiled, "deaths", SimpleNamespace(watch=lambda graph, actors: None, unwatch=lambda graph: None))
    asked = {"wait_for_loop": loops.get, "loop_runs": lambda actor: loops[actor] == "goes on"}
    monkeypatch.setattr(ray_dag, "call_loop", lambda actor, function, name: asked[function.__name__](actor))
    edges: Any = None
    graph = CompiledGraph("train_step", LIMITS, dag, "its loops", edges, edges, edges)
    assert not graph.reusable
    graph.teardown(0.2)
    (stopper,) = [thread for thread in threading.enumerate() if thread.name == "dagrl-teardown-train_step"]
    hangs.set()
    stopper.join(60.0)
    assert killed == ["b"]
    assert waited == [0.0], "the one that hung finds that Ray is shut down: it would start a cluster"


def test_a_graph_that_is_compiled_after_its_deadline_is_given_back() -> None:
    go_on, given_back = threading.Event(), threading.Event()

    def compile_(**limits: int) -> Any:
        assert go_on.wait(60.0)
        return SimpleNamespace(teardown=given_back.set)

    with pytest.raises(TimeoutError, match=r"not compiled it within timeouts\.compile_s = 0\.05 s"):
        ray_dag.compile_dag(SimpleNamespace(experimental_compile=compile_), "train_step", LIMITS, accelerator=False)
    go_on.set()
    assert given_back.wait(60.0), "its workers' threads are free for another one"


@pytest.mark.parametrize(("overlap", "accelerator", "told"), [(True, True, True), (True, False, None), (False, True, None)])
def test_only_graphs_with_accelerator_edges_overlap_communication(
    overlap: bool, accelerator: bool, told: bool | None
) -> None:
    given: dict[str, Any] = {}
    bound = SimpleNamespace(experimental_compile=lambda **options: given.update(options))
    limits = replace(LIMITS, overlap_communication=overlap, compile_s=10.0)
    ray_dag.compile_dag(bound, "train_step", limits, accelerator)
    assert given.get("_overlap_gpu_communication") is told
    assert given["_max_inflight_executions"] == given["_max_buffered_results"] == 2
