"""Several groups over the same actors, keyword arguments, and dispatchers."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import pytest
import ray

from dagrl.errors import PhaseError
from dagrl.runtime.graph import Arguments
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Shard, join, phase
from dagrl.runtime.schedule import Scheduler
from dagrl.runtime.worker_group import WorkerGroup
from tests.integration.schedules import actors_of, compiled


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
def train(actor: Shard, data):
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


PHASES = {train: 0, logprobs: 0, both: 0, stuck: 0.0, call: None}


@contextmanager
def scheduler_of(actors: list[Any], executor: str, engine: str = "dagrl") -> Iterator[Scheduler]:
    groups = [WorkerGroup.from_actors(actors, ParallelLayout(tp=2), "actor", health_group="health")]
    groups.append(WorkerGroup.from_actors(actors[::-1], ParallelLayout(dp=2), "ref", health_group="health"))
    with compiled(groups, PHASES, warm=False, executor=executor, engine=engine, replay_s=40.0) as scheduler:
        yield scheduler


@pytest.fixture
def actors(cluster: None) -> Iterator[list[Any]]:
    with actors_of(Colocated, [(0,), (1,)], groups={"_ray_system": 8, "health": 1}) as actors:
        yield actors


@pytest.mark.parametrize(
    ("executor", "engine"),
    [("compiled", "dagrl"), pytest.param("compiled", "ray", marks=pytest.mark.slow), ("eager", "dagrl")],
)
def test_roles_on_the_same_actors_take_turns_in_one_order(actors: list[Any], executor: str, engine: str) -> None:
    with scheduler_of(actors, executor, engine) as scheduler:
        replays = [scheduler.replay(item, value) for value in range(1, 4) for item in (train, logprobs, both, logprobs)]
        found = [replay.result() for replay in replays]
        begun = [ray.get(actor.history.remote()) for actor in actors]
        runs = [run.label for runs in scheduler.groups["ref"].drain_runs(20.0) for run in runs if run.replay == 0]
    for value, (trained, first, joined, second) in zip(range(1, 4), zip(*[iter(found)] * 4, strict=True), strict=True):
        assert trained == ([(rank, 3 * value, True) for rank in (0, 1)],)
        assert first == second == (value + 1, value)  # the ranks of `ref` are the actors in reverse
        ranks = [(0, 2 * (value + 1), False), (1, 2 * value, False)]
        assert joined == ([value + 1, value, *ranks],)
    assert begun == [["train", "logprobs", "logprobs", "train", "logprobs"] * 3] * 2
    assert set(runs) == {"ref[0]._execute", "ref[0].ref_logprobs", "ref[1].ref_logprobs"}


def test_a_call_passes_the_arguments_that_it_is_given(actors: list[Any]) -> None:
    with scheduler_of(actors, "compiled") as scheduler:
        for value in (4, 5):
            given = Arguments((value,), {"factor": 10, "eval_mode": value == 5})
            plain = ray.get([actor.actor_train.remote(*given.args, **given.kwargs) for actor in actors])
            assert scheduler.replay(call, given).result() == (plain,)
        with pytest.raises(PhaseError, match=r"actor\[0\].actor_train spreads its input .* given a int; .* Arguments\(args"):
            scheduler.replay(call, 4).result()
        with pytest.raises(PhaseError, match="missing 1 required positional argument"):
            scheduler.replay(call, Arguments((4,))).result()


def test_a_hang_in_one_role_names_it_and_leaves_the_actors_alive(actors: list[Any]) -> None:
    with scheduler_of(actors, "compiled") as scheduler:
        replay = scheduler.replay(stuck, 4.0, deadline_s=0.5)
        behind = scheduler.replay(train, 1, deadline_s=0.6)
        with pytest.raises(PhaseError) as hung:
            replay.result()
        assert {(failure.role, failure.kind) for failure in hung.value.failures} == {("ref", "hung")}
        with pytest.raises(PhaseError, match="train"):
            behind.result()
        scheduler.recover()  # waits until they have left it: nobody has killed them
        assert scheduler.replay(logprobs, 5).result() == (6, 5)


def test_a_death_is_named_once(actors: list[Any]) -> None:
    with scheduler_of(actors, "compiled") as scheduler:
        ray.kill(actors[1])
        with pytest.raises(PhaseError) as died:
            for _ in range(600):  # on a busy machine, the process outlives the call by seconds
                scheduler.replay(both, 1).result()
                time.sleep(0.05)
        found = [(failure.role, failure.rank, failure.kind) for failure in died.value.failures]
        assert found == [("actor", 1, "died")], died.value
