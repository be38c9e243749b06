"""The teardown of a compiled graph: one deadline for all its waits, and nobody is killed who need not be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dagrl.executors import compiled
from dagrl.executors.compiled import CompiledGraph

TIMEOUT_S = 4.0


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
    graph, killed = CompiledGraph.__new__(CompiledGraph), list[str]()
    vars(graph).update(
        _phase="train_step",
        _limits=SimpleNamespace(may_kill=may_kill),
        _actors=["a", "b"],
        _dag=SimpleNamespace(teardown=lambda: None),
        _running=lambda: list(running),
    )
    monkeypatch.setattr(compiled, "time", clock)
    monkeypatch.setattr(compiled, "threading", SimpleNamespace(Thread=clock.thread))
    monkeypatch.setattr(compiled, "ray", SimpleNamespace(kill=killed.append))
    graph.teardown(TIMEOUT_S)
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


def test_only_workers_whose_loops_go_on_count_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(loops: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        ended = [loop for loop in loops if loop.startswith("ended")][:num_returns]
        return ended, [loop for loop in loops if loop not in ended]

    graph = CompiledGraph.__new__(CompiledGraph)
    loops = {"a": "ended 1", "b": "goes on", "c": "ended 2"}
    vars(graph)["_dag"] = SimpleNamespace(worker_task_refs=loops)
    monkeypatch.setattr(compiled, "ray", SimpleNamespace(wait=wait))
    assert graph._running() == ["b"]


def test_a_graph_that_is_compiled_after_its_deadline_is_given_back() -> None:
    go_on, given_back = threading.Event(), threading.Event()

    def compile_(**limits: int) -> Any:
        assert go_on.wait(60.0)
        return SimpleNamespace(teardown=given_back.set)

    graph = CompiledGraph.__new__(CompiledGraph)
    vars(graph).update(_phase="train_step", _limits=SimpleNamespace(max_in_flight=2, compile_s=0.05))
    with pytest.raises(TimeoutError, match=r"not compiled it within timeouts\.compile_s = 0\.05 s"):
        graph._compile(SimpleNamespace(experimental_compile=compile_))
    go_on.set()
    assert given_back.wait(60.0), "its workers' threads are free for another one"
