"""Actors that somebody else made, of any class, options and roles: any number of phases, in turns and in order, on all."""

import asyncio
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import ray

from dagrl.errors import DeadlineError, PhaseError, WorkerError
from dagrl.runtime import compile as compile_module
from dagrl.runtime.executors.eager import takes_in_order
from dagrl.runtime.graph import Arguments
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Phase, Shard, join, phase
from dagrl.runtime.schedule import Scheduler
from dagrl.runtime.worker import in_warmup
from dagrl.runtime.worker_group import WorkerGroup
from tests.integration.schedules import actors_of, compiled


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

    def forget(self) -> None:
        self.begun, self.overlapped = [], False


class WithEventLoop(Threaded):
    """Ray runs all methods of such an actor on one event loop, up to 1000 of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = asyncio.Lock()
        self.released = asyncio.Event()

    async def later(self, value: int) -> tuple[int, bool, str]:
        async with self.lock:  # of the event loop that runs this actor's methods
            await asyncio.sleep(0.001)
        return value, in_warmup(), threading.current_thread().name

    async def thread(self) -> str:
        return threading.current_thread().name

    async def until_released(self, value: int) -> int:
        await self.released.wait()
        return value

    async def release(self) -> None:
        self.released.set()


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


@phase
def blocked(train: Shard, value):
    return train.map("until_released", value)


ORDER = {"two": ["first", "second"], "one": ["alone"], "back_and_forth": ["out", "back", *(f"after {n}" for n in range(6))]}
"""The nodes of worker 0 in each phase."""


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"worker": Threaded},
    "two threads": {"worker": Threaded, "max_concurrency": 2},
    "an event loop": {"worker": WithEventLoop},
    "concurrency groups": {"worker": Threaded, "max_concurrency": 3, "groups": {"io": 2}},
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(way, marks=[pytest.mark.slow] * (way in ("two threads", "concurrency groups"))) for way in WAYS],
)
def made(cluster: None, request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    with actors_of(**WAYS[request.param]) as made:
        yield made


@pytest.fixture
def with_an_event_loop(cluster: None) -> Iterator[list[Any]]:
    with actors_of(WithEventLoop) as made:
        yield made


@pytest.fixture
def actors(made: list[Any]) -> list[Any]:
    """One scheduler after the other has them."""
    ray.get([actor.forget.remote() for actor in made])
    return made


def running(actors: list[Any], phases: Collection[Phase], executor: str = "compiled") -> AbstractContextManager[Scheduler]:
    """Starts a scheduler of phases on two actors, without a warm-up."""
    group = WorkerGroup.from_actors(actors, ParallelLayout(tp=2))
    return compiled(group, dict.fromkeys(phases, 0), warm=False, executor=executor, replay_s=40.0)


def test_eager_nodes_keep_the_order_of_replays_and_of_their_phase(actors: list[Any]) -> None:
    with running(actors, (two, one, back_and_forth), "eager") as scheduler:
        started = [(item, value) for value in range(5) for item in (two, back_and_forth, one)]
        replays = [scheduler.replay(item, value) for item, value in started]
        assert [replay.result() for replay in replays[:3]] == [([0] * 4,), ([0] * 7,), ([0, 0],)]
        for replay, (_, value) in zip(replays, started, strict=True):
            assert set(replay.result()[0]) == {value}
        (begun, overlapped), (_, other_overlapped) = scheduler.groups["train"].call("history")
    assert begun == [(name, value) for item, value in started for name in ORDER[item.name]]
    assert not overlapped and not other_overlapped


def test_handles_from_other_processes_know_the_threads_of_their_actor(cluster: None) -> None:
    """Handles that were asked for by name, or came in a message, as those of actors that another process made."""
    made = [ray.remote(num_cpus=0)(Threaded).options(max_concurrency=n, name=f"{n} threads").remote() for n in (1, 4)]
    found = [takes_in_order(ray.get_actor(f"{n} threads")) for n in (1, 4)]
    sent = [takes_in_order(actor) for actor in ray.get(ray.put(made))]
    assert found == sent == [True, False]
    for actor in made:
        ray.kill(actor)


def test_failures_of_an_actor_with_threads_block_no_other_node(cluster: None) -> None:
    """Neither an exception, whose node lets the next one in, nor a death, after which none may come."""
    with actors_of(Threaded, max_concurrency=4) as actors, running(actors, (two, refused), "eager") as scheduler:
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


@pytest.mark.parametrize("on_ray", ["", "one"], ids=["one engine", "both engines"])
def test_compiled_phases_of_any_number_keep_their_order_too(actors: list[Any], monkeypatch: Any, on_ray: str) -> None:
    """Also if one of them runs on Ray's engine, which takes the only thread that Ray has for loops on such an actor."""
    monkeypatch.setattr(compile_module, "accelerated", lambda graph: graph.phase == on_ray)
    more = [replace(one, name=f"more_{number}") for number in range(4)]
    with running(actors, [two, one, back_and_forth, *more]) as scheduler:
        started = [(item, value) for value in range(3) for item in (two, more[value], back_and_forth, one)]
        replays = [scheduler.replay(item, value) for item, value in started]
        for replay, (_, value) in zip(replays, started, strict=True):
            assert set(replay.result()[0]) == {value}
        begun, overlapped = scheduler.groups["train"].call("history")[0]
    order = {**ORDER, **{item.name: ORDER["one"] for item in more}}
    assert begun == [(name, value) for item, value in started for name in order[item.name]] and not overlapped


def test_plain_calls_between_replays_keep_their_order_and_are_never_lost(actors: list[Any]) -> None:
    with running(actors, [one]) as scheduler:
        meanwhile = []
        for value in range(4):
            ray.get([actor.run.remote(value, name="before") for actor in actors])
            replay = scheduler.replay(one, value)
            meanwhile += [actor.run.remote(value, name="meanwhile") for actor in actors]
            assert replay.result() == ([value, value],)
            ray.get([actor.run.remote(value, name="after") for actor in actors])
        assert ray.get(meanwhile) == [value for value in range(4) for _ in actors]
        histories = [begun for begun, _ in ray.get([actor.history.remote() for actor in actors])]
    for begun in histories:
        waited = [(name, value) for value in range(4) for name in ("before", "alone", "after")]
        assert [call for call in begun if call[0] != "meanwhile"] == waited
        assert sorted(call for call in begun if call[0] == "meanwhile") == [("meanwhile", value) for value in range(4)]


@pytest.mark.parametrize("executor", ["compiled", "eager"])
def test_async_methods_run_on_the_event_loop_of_their_actor(with_an_event_loop: list[Any], executor: str) -> None:
    with running(with_an_event_loop, (awaits, one), executor) as scheduler:
        loops = ray.get([actor.thread.remote() for actor in with_an_event_loop])
        replays = [scheduler.replay(item, 1) for item in (awaits, one, awaits)]
        found = [replay.result() for replay in replays]
    assert found == [([(1, False, name) for name in loops],), ([1, 1],), ([(1, False, name) for name in loops],)]


def test_a_health_group_that_the_actors_lack_is_an_error(cluster: None) -> None:
    actor = ray.remote(num_cpus=0, concurrency_groups={"health": 1})(Threaded).remote()
    assert WorkerGroup.from_actors([actor], ParallelLayout(), health_group="health").answers_while_busy
    with pytest.raises(
        WorkerError, match=r"concurrency group 'healt'\nMake the actors by .*concurrency_groups={'healt': 1}"
    ):
        WorkerGroup.from_actors([actor], ParallelLayout(), health_group="healt")


def test_an_actor_that_ray_does_not_start_is_late(cluster: None) -> None:
    actor = ray.remote(num_cpus=99)(Threaded).remote()
    with pytest.raises(DeadlineError, match=r"still in 'start'.*raise call_timeout_s of .* Ray starts an actor once"):
        WorkerGroup.from_actors([actor], ParallelLayout(), call_timeout_s=0.1)


def test_plain_calls_run_while_a_node_waits_on_the_event_loop(with_an_event_loop: list[Any]) -> None:
    actors = with_an_event_loop
    with running(actors, [blocked]) as scheduler:
        replay = scheduler.replay(blocked, 5)
        assert ray.get([actor.later.remote(3) for actor in actors])[0][0] == 3
        with pytest.raises(DeadlineError):
            replay.result(timeout_s=0)
        ray.get([actor.release.remote() for actor in actors])
        assert replay.result() == ([5, 5],)


def test_a_coroutine_that_does_not_end_is_cancelled_and_its_actor_goes_on(with_an_event_loop: list[Any]) -> None:
    with running(with_an_event_loop, (blocked, one)) as scheduler:
        with pytest.raises(PhaseError, match=r"(?s)hung.*train\[0\]\.until_released"):
            scheduler.replay(blocked, 5, deadline_s=0.5).result()
        scheduler.recover()
        assert scheduler.replay(one, 6).result() == ([6, 6],)
        assert ray.get(with_an_event_loop[0].later.remote(3))[0] == 3


class Colocated:
    """Two roles in one actor, as fleets make them: by a prefix, and behind a dispatcher."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.begun: list[str] = []

    def actor_train(self, data: int, factor: int, *, eval_mode: bool = False) -> Any:
        self.begun.append("train")
        return self.rank, factor * data, eval_mode

    def ref_logprobs(self, *, data: int) -> int:
        self.begun.append("logprobs")
        return data + self.rank

    def _execute(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def history(self) -> list[str]:
        return self.begun


@phase
def train_both(actor: Shard, data):
    return actor.map("actor_train", data, factor=Fraction(3), eval_mode=True)


@phase
def logprobs(ref: Shard, data):
    return ref.map("_execute", "ref_logprobs", data=data)


@phase
def both(actor: Shard, ref: Shard, data):
    """Nodes of both roles on every actor, of which one reads the other's result."""
    found = ref.map("ref_logprobs", data=data)
    return join(found, actor.map("actor_train", found, 2))


@phase
def call(actor: Shard, arguments):
    return actor.spread("actor_train", arguments)


@phase
def stuck(ref: Shard, seconds):
    return ref.map("sleep", seconds)


PHASES = {train_both: 0, logprobs: 0, both: 0, stuck: 0.0, call: None}


@contextmanager
def scheduler_of(colocated: list[Any], executor: str, engine: str = "dagrl") -> Iterator[Scheduler]:
    groups = [WorkerGroup.from_actors(colocated, ParallelLayout(tp=2), "actor", health_group="health")]
    groups.append(WorkerGroup.from_actors(colocated[::-1], ParallelLayout(dp=2), "ref", health_group="health"))
    with compiled(groups, PHASES, warm=False, executor=executor, engine=engine, replay_s=40.0) as scheduler:
        yield scheduler


@pytest.fixture
def colocated(cluster: None) -> Iterator[list[Any]]:
    with actors_of(Colocated, [(0,), (1,)], groups={"_ray_system": 8, "health": 1}) as colocated:
        yield colocated


@pytest.mark.parametrize(
    ("executor", "engine"),
    [("compiled", "dagrl"), pytest.param("compiled", "ray", marks=pytest.mark.slow), ("eager", "dagrl")],
)
def test_roles_on_the_same_actors_take_turns_in_one_order(colocated: list[Any], executor: str, engine: str) -> None:
    with scheduler_of(colocated, executor, engine) as scheduler:
        replays = [scheduler.replay(item, value) for value in range(1, 4) for item in (train_both, logprobs, both, logprobs)]
        found = [replay.result() for replay in replays]
        begun = [ray.get(actor.history.remote()) for actor in colocated]
        runs = [run.label for runs in scheduler.groups["ref"].drain_runs(20.0) for run in runs if run.replay == 0]
    for value, (trained, first, joined, second) in zip(range(1, 4), zip(*[iter(found)] * 4, strict=True), strict=True):
        assert trained == ([(rank, 3 * value, True) for rank in (0, 1)],)
        assert first == second == (value + 1, value)  # the ranks of `ref` are the actors in reverse
        ranks = [(0, 2 * (value + 1), False), (1, 2 * value, False)]
        assert joined == ([value + 1, value, *ranks],)
    assert begun == [["train", "logprobs", "logprobs", "train", "logprobs"] * 3] * 2
    assert set(runs) == {"ref[0]._execute", "ref[0].ref_logprobs", "ref[1].ref_logprobs"}


def test_a_call_passes_the_arguments_that_it_is_given(colocated: list[Any]) -> None:
    with scheduler_of(colocated, "compiled") as scheduler:
        for value in (4, 5):
            given = Arguments((value,), {"factor": 10, "eval_mode": value == 5})
            plain = ray.get([actor.actor_train.remote(*given.args, **given.kwargs) for actor in colocated])
            assert scheduler.replay(call, given).result() == (plain,)
        with pytest.raises(PhaseError, match=r"actor\[0\].actor_train spreads its input .* given a int; .* Arguments\(args"):
            scheduler.replay(call, 4).result()
        with pytest.raises(PhaseError, match="missing 1 required positional argument"):
            scheduler.replay(call, Arguments((4,))).result()


def test_a_hang_in_one_role_names_it_and_leaves_the_actors_alive(colocated: list[Any]) -> None:
    with scheduler_of(colocated, "compiled") as scheduler:
        replay = scheduler.replay(stuck, 4.0, deadline_s=0.5)
        behind = scheduler.replay(train_both, 1, deadline_s=0.6)
        with pytest.raises(PhaseError) as hung:
            replay.result()
        assert {(failure.role, failure.kind) for failure in hung.value.failures} == {("ref", "hung")}
        with pytest.raises(PhaseError, match="train_both"):
            behind.result()
        scheduler.recover()  # waits until they have left it: nobody has killed them
        assert scheduler.replay(logprobs, 5).result() == (6, 5)


def test_a_death_is_named_once(colocated: list[Any]) -> None:
    with scheduler_of(colocated, "compiled") as scheduler:
        ray.kill(colocated[1])
        with pytest.raises(PhaseError) as died:
            for _ in range(600):  # on a busy machine, the process outlives the call by seconds
                scheduler.replay(both, 1).result()
                time.sleep(0.05)
        found = [(failure.role, failure.rank, failure.kind) for failure in died.value.failures]
        assert found == [("actor", 1, "died")], died.value
