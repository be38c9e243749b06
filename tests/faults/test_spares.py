"""Groups made whole after a death: living processes are kept, and spares, which had started before, take lost places."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import ray

from dagrl.errors import DeadlineError, PhaseError
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.options import SchedulerOptions
from dagrl.runtime.phase import Shard, join, phase
from dagrl.runtime.revive import Revival, revive
from dagrl.runtime.schedule import Scheduler
from dagrl.runtime.spares import take_place
from dagrl.runtime.worker import WorkerContext
from dagrl.runtime.worker_group import WorkerGroup
from tests.integration.fake_workers import FakeWorker

REST_S, START_S = 3.0, 60.0


class Resettable(FakeWorker):
    """Tells how often it was constructed and set up in this process, and whether it had prepared before it had its rank."""

    constructed = 0
    prepared_as: int | None = None
    setups = 0

    def __init__(self, context: WorkerContext, config: object) -> None:
        super().__init__(context, config)
        type(self).constructed += 1

    def prepare(self) -> None:
        if self.prepared_as is None:
            self.prepared_as = self.context.rank

    def setup(self, address: str) -> None:
        super().setup(address)
        self.setups += 1

    def reset(self) -> bool:
        return self.context.rank != self.config

    def story(self) -> tuple[int, int | None, int, int]:
        return self.context.rank, self.prepared_as, self.constructed, self.setups


@phase
def ranks(train: Shard, value):
    return train.map("rank", value)


class ByShard(Resettable):
    """Each shard is set up alone."""

    meets_by_shard = True


@phase
def slow(train: Shard, until):
    return train.map("slow", until)


@phase
def misbehave(other: Shard, how):
    return other.map("misbehave", how)


@phase
def both(train: Shard, other: Shard, how):
    return join(train.map("misbehave", how), other.map("misbehave", how))


def replayed(group: WorkerGroup) -> object:
    with Scheduler([group], SchedulerOptions(fallback="error", teardown_s=4.0)) as scheduler:
        scheduler.add(ranks, warmup_value=None)
        scheduler.compile()
        return scheduler.replay(ranks).result()


def pids(group: WorkerGroup) -> list[int]:
    return [location.pid for location in group.locations]


def wait_for_spare(group: WorkerGroup) -> int:
    """Returns the pid of the only spare, once it has prepared."""
    (spare,) = group._starter.pool._waiting
    ray.get(spare.prepared, timeout=START_S)
    return int(ray.get(spare.actor.__ray_call__.remote(lambda worker: os.getpid()), timeout=START_S))


def test_a_spare_takes_the_place_of_a_dead_worker_and_the_others_keep_their_processes(cluster: None) -> None:
    group = WorkerGroup.create("train", Resettable, ParallelLayout(dp=1, tp=3), None, spares=1)
    try:
        group.fill_spares()
        spare, before = wait_for_spare(group), pids(group)
        os.kill(before[1], signal.SIGKILL)
        assert revive(group, rest_s=REST_S) == Revival(kept=2, spares=1, started=0)
        assert pids(group) == [before[0], spare, before[2]]
        assert group.call("story") == [(0, 0, 1, 2), (1, 0, 2, 1), (2, 2, 1, 2)]
        assert replayed(group) == ([0, 1, 2],)
        group.fill_spares()
        last = wait_for_spare(group)
    finally:
        group.shutdown(2.0)
    gone = [before[0], spare, before[2], last]
    until = time.monotonic() + START_S
    while any(Path(f"/proc/{pid}").exists() for pid in gone) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in gone if Path(f"/proc/{pid}").exists()], "the group's end ends its spares"


@pytest.mark.slow
def test_dead_spares_hung_workers_and_those_that_cannot_be_reset_are_replaced_by_new_processes(cluster: None) -> None:
    group = WorkerGroup.create("train", Resettable, ParallelLayout(dp=1, tp=3), 2, spares=1)
    try:
        group.fill_spares()
        os.kill(wait_for_spare(group), signal.SIGKILL)
        before = pids(group)
        group.actors[0].__ray_call__.remote(lambda worker: time.sleep(3600.0))  # `reset` waits behind it
        assert revive(group, rest_s=REST_S) == Revival(kept=1, spares=0, started=2)
        assert [now == then for now, then in zip(pids(group), before, strict=True)] == [False, True, False]
        assert replayed(group) == ([0, 1, 2],)
    finally:
        group.shutdown(2.0)


def test_one_shard_is_replaced_while_another_role_computes(cluster: None, tmp_path: Path) -> None:
    """The dead worker's graph alone is compiled again. Meanwhile the other shard and `train` go on."""
    train = WorkerGroup.create("train", Resettable, ParallelLayout(), None)
    other = WorkerGroup.create("other", ByShard, ParallelLayout(dp=2), None, spares=1)
    other.fill_spares()
    wait_for_spare(other)
    done = tmp_path / "done"
    try:
        with Scheduler([train, other], SchedulerOptions(fallback="error", teardown_s=4.0)) as scheduler:
            scheduler.add(slow, warmup_value=0.0)
            scheduler.add(misbehave, warmup_value={"rank": -1})
            scheduler.compile()
            scheduler.warmup()
            working = scheduler.replay(slow, str(done))
            with pytest.raises(PhaseError, match=r"other worker 1 .* died"):
                scheduler.replay(misbehave, {"rank": 1, "kind": "die"}).result()
            assert scheduler.broken == ("other",)
            assert scheduler.recover(["other"], {"other": {1}}) == {}
            assert scheduler.replay(misbehave, {"rank": -1}).result() == (0,), "the other shard goes on"
            assert revive(other, {1}, rest_s=REST_S) == Revival(kept=0, spares=1, started=0)
            assert scheduler.recover(["other"]) == {"misbehave": [1]}
            assert scheduler.replay(misbehave, {"rank": -1}).result() == (0, 1)
            assert [setups for *_, setups in other.call("story")] == [1, 1]
            with pytest.raises(DeadlineError, match="train workers still run"), scheduler.at_rest(0.3):
                pass
            assert not working.ready()
            done.touch()
            assert working.result() == ("done",)
            with scheduler.at_rest(START_S):
                assert scheduler.replay(slow, 0.0).result() == ("done",)
    finally:
        train.shutdown(2.0)
        other.shutdown(2.0)


def test_shards_join_and_leave_while_another_role_computes(cluster: None, tmp_path: Path) -> None:
    """Graphs of shards that keep their number stay. Of three, the first leaves: the others have new ranks and graphs."""
    train = WorkerGroup.create("train", Resettable, ParallelLayout(), None)
    other = WorkerGroup.create("other", ByShard, ParallelLayout(), None)
    done = tmp_path / "done"
    try:
        with Scheduler([train, other], SchedulerOptions(fallback="error", teardown_s=4.0)) as scheduler:
            for added in (slow, misbehave, both):
                scheduler.add(added, warmup_value=0.0 if added is slow else {"rank": -1})
            scheduler.compile()
            scheduler.warmup()
            working = scheduler.replay(slow, str(done))
            joining = other.start_shards(2)
            assert scheduler.replay(misbehave, {"rank": -1}).result() == (0,), "the shard works while others start"
            assert not working.ready()
            done.touch()
            kept = scheduler._entries["misbehave"].compiled
            with scheduler.at_rest(START_S):
                assert scheduler.resize("other", [0], joining) == []
            assert scheduler._entries["misbehave"].compiled[:1] == kept
            assert scheduler.replay(misbehave, {"rank": -1}).result() == (0, 1, 2)
            assert scheduler.replay(both, {"rank": -1}).result() == ([0, 0, 1, 2],)
            second, third = pids(other)[1:]
            (left,) = scheduler.resize("other", [1, 2])
            ray.kill(left)
            assert pids(other) == [second, third]
            assert scheduler.replay(misbehave, {"rank": -1}).result() == (0, 1)
            assert scheduler.replay(both, {"rank": -1}).result() == ([0, 0, 1],)
            with pytest.raises(PhaseError, match=r"other worker 1 .* died"):
                scheduler.replay(misbehave, {"rank": 1, "kind": "die"}).result()
            assert revive(other, {1}, rest_s=REST_S) == Revival(kept=0, spares=0, started=1)
            assert scheduler.recover(["other"]) == {"misbehave": [1], "both": [0]}
            assert scheduler.replay(misbehave, {"rank": -1}).result() == (0, 1), "a new process has the new rank"
    finally:
        train.shutdown(2.0)
        other.shutdown(2.0)


def test_a_spare_on_gpus_sees_only_the_place_that_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare sees all GPUs of its host; those of the lost worker are Ray's numbers, or entries of the visible list."""
    for variable in ("DAGRL_GPUS", "LOCAL_RANK"):
        monkeypatch.setenv(variable, "")
    worker = FakeWorker(WorkerContext("train", 0, ParallelLayout(tp=2)), None)
    for visible, index in ((None, "5"), ("4,5", "1")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        take_place(worker, WorkerContext("train", 1, ParallelLayout(tp=2)), "config", ("5",), 0, 1.0)
        assert (os.environ["LOCAL_RANK"], os.environ["DAGRL_GPUS"]) == (index, "5")
        assert worker.context.rank == 1
