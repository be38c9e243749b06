"""Groups made whole after a death: living processes are kept, and new ones take lost places."""

import os
import signal
import time
from pathlib import Path

import pytest

from dagrl.errors import DeadlineError, PhaseError
from dagrl.runtime.phase import Shard, phase
from dagrl.runtime.worker import WorkerContext
from dagrl.runtime.worker_group import Revival, WorkerGroup, revive
from tests.integration.fake_workers import FakeWorker
from tests.integration.schedules import compiled, group_of

REST_S, START_S = 3.0, 60.0


class Resettable(FakeWorker):
    """Tells how often it was constructed and set up in this process."""

    constructed = 0
    setups = 0

    def __init__(self, context: WorkerContext, config: object) -> None:
        super().__init__(context, config)
        type(self).constructed += 1

    def setup(self, address: str) -> None:
        super().setup(address)
        self.setups += 1

    def reset(self) -> bool:
        return self.context.rank != self.config

    def story(self) -> tuple[int, int, int]:
        return self.context.rank, self.constructed, self.setups


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


def replayed(group: WorkerGroup) -> object:
    with compiled(group, {ranks: None}, warm=False) as scheduler:
        return scheduler.replay(ranks).result()


def pids(group: WorkerGroup) -> list[int]:
    return [location.pid for location in group.locations]


def test_a_dead_worker_is_replaced_and_the_others_keep_their_processes(cluster: None) -> None:
    with group_of(Resettable, tp=3) as group:
        before = pids(group)
        os.kill(before[1], signal.SIGKILL)
        assert revive(group, rest_s=REST_S) == Revival(kept=2, started=1)
        after = pids(group)
        assert after[::2] == before[::2] and after[1] not in before
        assert group.call("story") == [(0, 1, 2), (1, 1, 1), (2, 1, 2)]
        assert replayed(group) == ([0, 1, 2],)


@pytest.mark.slow
def test_hung_workers_and_those_that_cannot_be_reset_are_replaced_by_new_processes(cluster: None) -> None:
    with group_of(Resettable, config=2, tp=3) as group:
        before = pids(group)
        group.actors[0].__ray_call__.remote(lambda worker: time.sleep(3600.0))  # `reset` waits behind it
        assert revive(group, rest_s=REST_S) == Revival(kept=1, started=2)
        assert [now == then for now, then in zip(pids(group), before, strict=True)] == [False, True, False]
        assert replayed(group) == ([0, 1, 2],)


@pytest.mark.slow
def test_one_shard_is_replaced_while_another_role_computes(cluster: None, tmp_path: Path) -> None:
    """The dead worker's graph alone is compiled again. Meanwhile the other shard and `train` go on."""
    done, phases = tmp_path / "done", {slow: 0.0, misbehave: {"rank": -1}}
    with (
        group_of(Resettable) as train,
        group_of(ByShard, "other", dp=2) as other,
        compiled([train, other], phases) as scheduler,
    ):
        working = scheduler.replay(slow, str(done))
        with pytest.raises(PhaseError, match=r"other worker 1 .* died"):
            scheduler.replay(misbehave, {"rank": 1, "kind": "die"}).result()
        assert scheduler.broken == ("other",)
        other.out_of_service.add(1)
        assert scheduler.recover(["other"]) == {}
        assert scheduler.replay(misbehave, {"rank": -1}).result() == (0,), "the other shard goes on"
        assert revive(other, {1}, rest_s=REST_S) == Revival(kept=0, started=1)
        other.out_of_service.clear()
        assert scheduler.recover(["other"]) == {"misbehave": [1]}
        assert scheduler.replay(misbehave, {"rank": -1}).result() == (0, 1)
        assert [setups for *_, setups in other.call("story")] == [1, 1]
        with pytest.raises(DeadlineError, match="train workers still run"), scheduler.at_rest(0.3):
            pass
        with pytest.raises(DeadlineError):
            working.result(timeout_s=0)
        done.touch()
        assert working.result() == ("done",)
        with scheduler.at_rest(START_S):
            assert scheduler.replay(slow, 0.0).result() == ("done",)
