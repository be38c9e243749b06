"""The teardown of a compiled graph: one deadline for all its waits, and nobody is killed who need not be."""

from __future__ import annotations

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
