"""Outcomes of replays over several shards: a death in one is heard at once, though another waits in a collective."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from dagrl import failures
from dagrl.errors import PhaseError, WorkerFailure
from dagrl.executors.packet import Header, Packet
from dagrl.failures import collect_outcome
from dagrl.worker_group import WorkerGroup

HEADER = Header("train_step", 0, False, {"train": 0})


class Shard:
    """A graph of which the result comes, an error, or nothing until its worker is released."""

    def __init__(self, outcome: Any = None, after_s: float = 0.0, come: Sequence[WorkerFailure] = ()) -> None:
        self.outcome, self.ready, self.come = outcome, time.monotonic() + after_s, come

    def fetch(self, submitted: object, timeout_s: float) -> list[Packet]:
        left = self.ready - time.monotonic() if self.outcome is not None else float("inf")
        time.sleep(max(0.0, min(left, timeout_s)))
        if left > timeout_s:
            raise TimeoutError
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return [Packet(HEADER, self.outcome)]

    def failures(self, submitted: object) -> list[WorkerFailure]:
        return list(self.come)


class Group:
    """Train workers; those that are aborted come out of their collective."""

    def __init__(self, *hung: Shard) -> None:
        self.role = SimpleNamespace(name="train")
        self.layout = SimpleNamespace(coordinates=lambda rank: f"dp {rank}")
        self.places = [SimpleNamespace(host="here", pid=rank) for rank in range(3)]
        self.hung, self.lost = hung, set[int]()

    failure = WorkerGroup.failure  # type: ignore[assignment]

    def rank_of_actor(self, actor_id: str) -> int:
        return 1

    def abort(self, lost: set[int]) -> None:
        self.lost = lost
        for shard in self.hung:
            shard.outcome, shard.ready = "aborted", time.monotonic()


def replay(*shards: Shard, deadline_s: float = 30.0) -> Any:
    submitted = [(shard, None) for shard in shards]
    return SimpleNamespace(phase="train_step", number=0, submitted=submitted, deadline=time.monotonic() + deadline_s)


def test_a_death_is_heard_while_another_shard_hangs_and_frees_it() -> None:
    hung = Shard()
    group = Group(hung)
    started = time.monotonic()
    with pytest.raises(PhaseError) as caught:
        collect_outcome(replay(hung, Shard(RayActorError(), after_s=0.05), Shard("done")), {"train": group})  # type: ignore[dict-item]
    assert time.monotonic() - started < 10.0  # not the deadline of the replay
    assert [(failure.rank, failure.kind) for failure in caught.value.failures] == [(1, "died")]
    assert group.lost == {1}


def test_a_failure_is_heard_while_another_worker_of_its_graph_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer waits for it in a collective; it has a grace time to come out, not the deadline of the replay."""
    monkeypatch.setattr(failures, "GRACE_S", 0.3)
    raised = dataclasses.replace(Group().failure(2, "raised", "train[2].step", "ValueError: bad"), replay=0)
    started = time.monotonic()
    with pytest.raises(PhaseError) as caught:
        collect_outcome(replay(Shard(come=[raised])), {})
    assert time.monotonic() - started < 10.0
    assert caught.value.failures == (raised,)


def test_results_come_in_the_order_of_the_shards() -> None:
    shards = [Shard("slow", after_s=0.3), Shard("quick"), Shard("middle", after_s=0.15)]
    assert [packets[0].value for packets in collect_outcome(replay(*shards), {})] == ["slow", "quick", "middle"]
