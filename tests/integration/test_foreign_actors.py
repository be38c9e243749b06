"""Actors that somebody else made, with several threads or `async` methods: turns and the order of nodes hold there too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from dagrl.errors import GraphError, PhaseError
from dagrl.runtime.executors.eager import takes_in_order
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Shard, join, phase
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.runtime.worker_group import WorkerGroup


class Threaded:
    """Remembers the order in which its nodes began, and whether one began while another ran."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.inside = threading.Lock()
        self.overlapped = False

    def run(self, value: int, name: str, seconds: float = 0.0) -> int:
        alone = self.inside.acquire(blocking=False)
        self.overlapped |= not alone
        self.begun.append((name, value))
        time.sleep(seconds)
        if alone:
            self.inside.release()
        return value

    def refuse(self, value: int) -> int:
        raise ValueError(f"told to refuse {value}")

    def history(self) -> tuple[list[tuple[str, int]], bool]:
        return self.begun, self.overlapped


class WithEventLoop(Threaded):
    """Ray runs all methods of such an actor on one event loop, up to 1000 of them at once."""

    async def later(self, value: int) -> int:
        return value


@phase
def two(train: Shard, value):
    """The first node of each worker takes longer than the second, which waits for no value of it."""
    return join(train.map("run", value, name="first", seconds=0.02), train.map("run", value, name="second"))


@phase
def one(train: Shard, value):
    return train.map("run", value, name="alone", seconds=0.01)


@phase
def back_and_forth(train: Shard, value):
    """Worker 0 has a node that waits for worker 1, and then more that wait for nothing than it has threads."""
    there = train[1].map("run", train[0].map("run", value, name="out"), name="there", seconds=0.1)
    back = train[0].map("run", there, name="back")
    return join(back, *[train[0].map("run", value, name=f"after {number}") for number in range(6)])


@phase
def refused(train: Shard, value):
    return train.map("run", train.map("refuse", value), name="never")


@phase
def awaits(train: Shard, value):
    return train.map("later", value)


ORDER = {"two": ["first", "second"], "one": ["alone"], "back_and_forth": ["out", "back", *(f"after {n}" for n in range(6))]}
"""The nodes of worker 0 in each phase."""


def two_actors(worker: type, **options: Any) -> list[Any]:
    return [ray.remote(num_cpus=0)(worker).options(**options).remote() for _ in range(2)]


def with_two_threads() -> list[Any]:
    return two_actors(Threaded, max_concurrency=2)


def with_four_threads() -> list[Any]:
    return two_actors(Threaded, max_concurrency=4)


def with_an_event_loop() -> list[Any]:
    return two_actors(WithEventLoop)


@pytest.fixture(params=[with_two_threads, with_four_threads, with_an_event_loop])
def actors(cluster: None, request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    make: Callable[[], list[Any]] = request.param
    made = make()
    yield made
    for actor in made:
        ray.kill(actor)


def scheduler_of(actors: list[Any], executor: Any) -> Scheduler:
    options = SchedulerOptions(executor=executor, fallback="error", replay_s=40.0, teardown_s=5.0)
    return Scheduler([WorkerGroup.from_actors(actors, ParallelLayout(tp=2))], options)


def test_eager_nodes_keep_the_order_of_replays_and_of_their_phase(actors: list[Any]) -> None:
    with scheduler_of(actors, "eager") as scheduler:
        for item in (two, one, back_and_forth):
            scheduler.add(item, warmup_value=0)
        scheduler.compile()
        started = [(item, value) for value in range(5) for item in (two, back_and_forth, one)]
        replays = [scheduler.replay(item, value) for item, value in started]
        assert [replay.result() for replay in replays[:3]] == [([0] * 4,), ([0] * 7,), ([0, 0],)]
        for replay, (_, value) in zip(replays, started, strict=True):
            assert set(replay.result()[0]) == {value}
        (begun, overlapped), (_, other_overlapped) = scheduler.groups["train"].call("history")
    assert begun == [(name, value) for item, value in started for name in ORDER[item.name]]
    assert not overlapped and not other_overlapped


def test_handles_from_elsewhere_tell_of_threads_too(cluster: None) -> None:
    """Handles that were asked for by name, or came in a message, as those of actors that another process made."""
    made = [ray.remote(num_cpus=0)(Threaded).options(max_concurrency=n, name=f"{n} threads").remote() for n in (1, 4)]
    found = [takes_in_order(ray.get_actor(f"{n} threads")) for n in (1, 4)]
    sent = [takes_in_order(actor) for actor in ray.get(ray.put(made))]
    assert found == sent == [True, False]
    for actor in made:
        ray.kill(actor)


def test_failures_of_an_actor_with_threads_hold_up_nobody(cluster: None) -> None:
    """Neither an exception, whose node lets the next one in, nor a death, after which none may come."""
    actors = with_four_threads()
    with scheduler_of(actors, "eager") as scheduler:
        for item in (two, refused):
            scheduler.add(item, warmup_value=0)
        scheduler.compile()
        for _ in range(2):
            replays = [scheduler.replay(item, 1) for item in (refused, two, refused, two)]
            for replay in replays[::2]:
                with pytest.raises(PhaseError, match="told to refuse 1"):
                    replay.result()
            assert [replay.result() for replay in replays[1::2]] == [([1] * 4,)] * 2
            scheduler.recover()
        ray.kill(actors[1])
        started = time.monotonic()
        with pytest.raises(PhaseError, match=r"train worker 1 .* died"):
            scheduler.replay(two, 2).result()
        assert time.monotonic() - started < 20.0  # half of the replay's deadline
    ray.kill(actors[0])


def test_compiled_nodes_keep_their_order_too(actors: list[Any]) -> None:
    with scheduler_of(actors, "compiled") as scheduler:
        scheduler.add(two, warmup_value=0)  # such actors have a thread for one graph
        scheduler.compile()
        replays = [scheduler.replay(two, value) for value in range(5)]
        assert [replay.result() for replay in replays] == [([value] * 4,) for value in range(5)]
        begun, overlapped = scheduler.groups["train"].call("history")[0]
    assert begun == [(name, value) for value in range(5) for name in ORDER["two"]] and not overlapped


def test_async_methods_of_foreign_actors_are_refused_when_a_phase_is_added(cluster: None) -> None:
    """Handles of actors do not tell which methods are `async`."""
    actors = with_an_event_loop()
    with scheduler_of(actors, "eager") as scheduler:
        with pytest.raises(GraphError, match=r"phase 'awaits': node train\.later is an `async def`"):
            scheduler.add(awaits, warmup_value=0)
        scheduler.add(one, warmup_value=0)
    for actor in actors:
        ray.kill(actor)
