"""Requests for another number of engines: what is refused before anything changes, and what is given up later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from dagrl.config.file import load_config
from dagrl.errors import DagrlError, DeadlineError, LayoutError, RunError, WorkerError
from dagrl.rl.rollout.engines import Change
from dagrl.run import resizing
from dagrl.run.engine_replacement import EngineReplacement
from dagrl.run.fleet import Fleet
from dagrl.run.resizing import Resizing
from dagrl.runtime.layout import ParallelLayout

ROOT = Path(__file__).parents[3]
GIB = 1 << 30


class FakeGroup:
    """Engines on one host, of 2 GiB each. Those that it starts are there at once, or once `started` is set."""

    def __init__(self) -> None:
        self.layout, self.reserved_gpus, self.role = ParallelLayout(dp=2), 0, None
        self.locations = [SimpleNamespace(host="a", node="a"), SimpleNamespace(host="a", node="b")]
        self.started, self.ended = threading.Event(), 0
        self.started.set()

    def call_function(self, function: object) -> list[tuple[int, int]]:
        return [(GIB, 5 * GIB), (2 * GIB, 5 * GIB)]

    def start_shards(self, count: int, while_waiting: Callable[[], None]) -> object:
        while not self.started.wait(0.01):
            while_waiting()
        return f"{count} engines"

    def end_shards(self, joining: object, timeout_s: float) -> None:
        self.ended += 1


def resizing_of(group: FakeGroup, *overrides: str) -> Resizing:
    config = load_config(ROOT / "examples" / "grpo_quickstart.yaml", ["cluster.max_workers=16", *overrides])
    scheduler = SimpleNamespace(graphs_of=lambda role, shards: {}, resize=lambda role, kept, joining: [])
    return Resizing(config, Fleet(), cast(Any, group), cast(Any, SimpleNamespace(scheduler=scheduler, devices=4)))


@pytest.fixture(autouse=True)
def cluster_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster with one free GPU, whose host `b` has gone."""
    monkeypatch.setattr(ray, "available_resources", lambda: {"GPU": 1.0})
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": name, "Alive": name == "a"} for name in "ab"])


@pytest.mark.parametrize(
    ("engines", "overrides", "text"),
    [
        (0, (), "0 engines were asked for; expected at least 1"),
        (2, (), "it has 2 engines already"),
        (15, (), r"17 workers, .* but cluster.max_workers is 16"),
        (4, ("cluster.gpus_per_worker=1",), "2 more workers need 2 GPUs, but 1 are free"),
        (5, (), "3 more workers need 6144 MiB of host memory, as much as those that run, but 5120 MiB are available"),
    ],
)
def test_what_there_is_no_room_for_is_refused(engines: int, overrides: tuple[str, ...], text: str) -> None:
    asked = resizing_of(group := FakeGroup(), *overrides)
    with pytest.raises(LayoutError, match=text):
        asked.scale(engines, 1.0)
    assert not asked.ready and not group.ended


def test_engines_that_start_late_or_join_at_no_refit_are_ended() -> None:
    asked = resizing_of(group := FakeGroup())
    with pytest.raises(DeadlineError, match=r"no refit came, .*; nothing has changed"):
        asked.scale(3, 0.1)
    assert asked.take_change() is None and group.ended == 1
    group.started.clear()
    with pytest.raises(DeadlineError, match="the new ones have not started; nothing has changed"):
        asked.scale(3, 0.1)


@pytest.mark.parametrize("what", ["end", "drop", "join"])
def test_one_request_at_a_time_ends_with_its_session_a_lost_engine_or_a_refit(what: str) -> None:
    asked, outcome = resizing_of(group := FakeGroup()), list[object]()

    def scale() -> None:
        try:
            outcome.append(asked.scale(3, 30.0))
        except DagrlError as error:
            outcome.append(error)

    thread = threading.Thread(target=scale)
    thread.start()
    while not asked.ready:
        thread.join(0.01)
    with pytest.raises(LayoutError, match="it is being scaled to 3 engines"):
        asked.scale(1, 1.0)
    if what == "end":
        asked.end()
    elif what == "drop":
        asked.drop({0})
    else:
        assert asked.take_change() == Change((0, 1), 3) and asked.begun and not asked.ready
        asked.resize()
        asked.finish()
    thread.join(10.0)
    (found,) = outcome
    if what == "join":
        assert "3 engines, before 2" in str(found) and not group.ended
    else:
        assert isinstance(found, RunError) and group.ended == 1
        assert asked.take_change() == (None if what == "end" else Change((1,), 1))


def test_engines_join_once_if_the_refit_fails_that_connects_them() -> None:
    asked, joined = resizing_of(FakeGroup()), list[object]()
    warm_ups = iter([WorkerError((), "an engine died"), None])

    def warmup(only: object) -> None:
        if (error := next(warm_ups)) is not None:
            raise error

    def resize(role: str, kept: object, joining: object) -> list[Any]:
        joined.append(joining)
        return []

    scheduler = asked._replays.scheduler
    vars(scheduler).update(resize=resize, warmup=warmup, recover=lambda roles: None, at_rest=lambda seconds: nullcontext())
    vars(asked._replays).update(phases={"refit": SimpleNamespace(name="refit")})
    replacement = EngineReplacement(asked._config, asked._fleet, asked._group, asked._replays, lambda: None, asked)
    thread = threading.Thread(target=asked.scale, args=(3, 30.0))
    thread.start()
    while not asked.ready:
        thread.join(0.01)
    asked.take_change()
    with pytest.raises(WorkerError, match="an engine died"):
        replacement.connect()
    assert replacement.unconnected
    replacement.connect()
    thread.join(10.0)
    assert joined == ["1 engines"] and not replacement.unconnected


def test_places_on_lost_hosts_need_free_gpus() -> None:
    group = cast(Any, FakeGroup())
    assert resizing.has_room(group, [0, 1], 1.0), "the other host has one"
    assert not resizing.has_room(group, [0, 1], 2.0)
    assert resizing.has_room(group, [0], 2.0) and resizing.has_room(group, [0, 1], 0.0)
