"""Outcomes of replays: who is named, freed and killed when a worker raises, dies or hangs; what can be asked for again."""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayChannelError, RayTaskError, UnserializableException

from dagrl import failures, worker_group
from dagrl.errors import DeadlineError, PhaseError, WorkerFailure
from dagrl.executors.node import DIED, IDLE, NO_ANSWER, Report
from dagrl.executors.packet import Header, Packet
from dagrl.executors.pickling import UnreadableError
from dagrl.failures import SoFar, collect_outcome
from dagrl.worker_group import WorkerGroup

HEADER = Header("train_step", 0, False, {"train": 0}, 10.0)


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
        if isinstance(self.outcome, WorkerFailure):
            return [Packet(HEADER, None, failures=(self.outcome,))]
        return [Packet(HEADER, self.outcome)]

    def failures(self, submitted: object) -> list[WorkerFailure]:
        return list(self.come)


BUSY = Report("train_step", 0, "train[0].step for 9 s (replay 0)", "a stack")
ELSEWHERE = Report("generate", 7, "generate for 1 s (replay 7)", "another stack")


class Group:
    """Three train workers; those that are aborted come out of their collective, if they are in one."""

    owned = True

    def __init__(self, *hung: Shard, reports: Sequence[Report] = (IDLE, IDLE, IDLE), stay: Sequence[int] = ()) -> None:
        self.role = SimpleNamespace(name="train")
        self.layout = SimpleNamespace(coordinates=lambda rank: f"dp {rank}", world_size=3)
        self.places = [SimpleNamespace(host="here", pid=rank) for rank in range(3)]
        self.hung, self.now, self.stay = hung, dict(enumerate(reports)), stay
        self.aborted, self.killed = list[int](), list[int]()

    failure = WorkerGroup.failure  # type: ignore[assignment]

    def rank_of_actor(self, actor_id: str) -> int:
        return 1

    def reports(self, timeout_s: float) -> dict[int, Report]:
        return dict(self.now)

    def abort(self, ranks: Sequence[int]) -> None:
        self.aborted += ranks
        self.now |= {rank: IDLE for rank in ranks if rank not in self.stay}
        for shard in self.hung:
            shard.outcome, shard.ready = "aborted", time.monotonic()

    def kill(self, ranks: Sequence[int]) -> None:
        self.killed += ranks


def replay(*shards: Shard, deadline_s: float = 600.0, grace_s: float = 0.3) -> Any:
    submitted = [(shard, None) for shard in shards]
    so_far = SoFar(deque(range(len(shards))), time.monotonic() + deadline_s, grace_s)
    return SimpleNamespace(phase="train_step", number=0, submitted=submitted, so_far=so_far)


def outcome_of(replay: Any, *groups: Any, **options: float) -> Any:
    return collect_outcome(replay, {group.role.name: group for group in groups}, **options)


def failure_of(replay: Any, *groups: Any) -> PhaseError:
    with pytest.raises(PhaseError) as caught:
        outcome_of(replay, *groups)
    return caught.value


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "GRACE_S", 0.3)
    monkeypatch.setattr(failures, "RELEASE_S", 0.3)


def test_a_hang_frees_those_that_wait_and_kills_who_stays() -> None:
    group = Group(reports=(BUSY, BUSY, IDLE), stay=[1])
    error = failure_of(replay(Shard(), deadline_s=0.05), group)
    assert [(failure.rank, failure.kind, failure.traceback) for failure in error.failures] == [(1, "hung", "a stack")]
    assert (group.aborted, group.killed) == ([0, 1], [1])
    assert error.breaks


def test_workers_are_looked_at_however_late_before_they_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that waits for them may itself be held up for longer than they have."""
    monkeypatch.setattr(failures, "RELEASE_S", 1e-9)
    group = Group(reports=(BUSY, BUSY, IDLE), stay=[1])
    failure_of(replay(Shard(), deadline_s=0.05), group)
    assert (group.aborted, group.killed) == ([0, 1], [1])


def test_workers_that_all_come_out_are_named_and_live() -> None:
    group = Group(reports=(BUSY, IDLE, BUSY))
    error = failure_of(replay(Shard(), deadline_s=0.05), group)
    assert [failure.rank for failure in error.failures] == [0, 2]
    assert (group.aborted, group.killed) == ([0, 2], [])


def test_workers_of_another_phase_are_left_alone() -> None:
    """The replay waited for its turn, or for one that hangs, while they did their work."""
    group = Group(reports=(ELSEWHERE, BUSY, IDLE), stay=[1])
    error = failure_of(replay(Shard(), deadline_s=0.05), group)
    assert [failure.rank for failure in error.failures] == [1]
    assert (group.aborted, group.killed) == ([1], [1])


def test_a_replay_that_only_waited_for_its_turn_says_behind_whom() -> None:
    group = Group(reports=(ELSEWHERE, ELSEWHERE, IDLE))
    error = failure_of(replay(Shard(), deadline_s=0.05), group)
    assert error.failures == () and error.breaks
    assert "no worker is running it (they are running 'generate', which comes before it)" in str(error)
    assert (group.aborted, group.killed) == ([], [])


def test_peers_of_a_worker_that_raised_are_freed_but_not_killed() -> None:
    """Over NCCL what the worker itself aborts does not reach them."""
    group = Group(reports=(IDLE, BUSY, IDLE), stay=[1])
    raised = dataclasses.replace(group.failure(2, "raised", "train[2].step", "ValueError: bad"), replay=0)
    error = failure_of(replay(Shard(come=[raised])), group)
    assert error.failures == (raised,)
    assert (group.aborted, group.killed) == ([1], [])
    assert error.breaks, "a worker is still inside"


def test_a_result_that_cannot_be_read_is_its_workers_failure_and_breaks_nothing() -> None:
    unreadable = UnreadableError(ValueError("cannot be made again"), None)
    unreadable.writer = ("of rank 1", "train[1].step")
    other = Group()
    other.role, other.rank_of_actor = SimpleNamespace(name="generation"), lambda actor_id: None  # type: ignore[assignment]
    error = failure_of(replay(Shard(unreadable)), other, Group())
    (failure,) = error.failures
    assert (failure.role, failure.rank, failure.kind, failure.node) == ("train", 1, "raised", "train[1].step")
    assert "cannot be read by the driver: ValueError: cannot be made again" in failure.message
    assert not error.breaks


def test_any_error_of_a_graph_is_one_of_the_replay() -> None:
    error = failure_of(replay(Shard(pickle.UnpicklingError("half a message")), Shard("done")), Group())
    assert "UnpicklingError: half a message" in str(error) and error.breaks


def test_an_interrupt_while_ray_raises_is_an_interrupt() -> None:
    interrupted = SystemError("<class 'GetTimeoutError'> returned a result with an exception set")
    interrupted.__cause__ = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        outcome_of(replay(Shard(interrupted)), Group())


def test_a_result_that_is_not_there_yet_can_be_asked_for_again() -> None:
    first, second = Shard("first"), Shard()
    asked = replay(first, second)
    with pytest.raises(DeadlineError, match="Ask again"):
        outcome_of(asked, Group(), until=time.monotonic() + 0.05)
    first.outcome, second.outcome = "read twice", "second"
    assert [packets[0].value for packets in outcome_of(asked, Group())] == ["first", "second"]


def test_a_death_is_heard_while_another_shard_hangs_and_frees_it() -> None:
    hung = Shard()
    group = Group(hung)
    started = time.monotonic()
    with pytest.raises(PhaseError) as caught:
        outcome_of(replay(hung, Shard(RayActorError(), after_s=0.05), Shard("done")), group)
    assert time.monotonic() - started < 60.0  # not the deadline of the replay
    assert [(failure.rank, failure.kind) for failure in caught.value.failures] == [(1, "died")]
    assert group.aborted == [0, 2]


def test_an_exception_that_comes_in_place_of_a_result_fails_the_replay_and_breaks_nothing() -> None:
    """The others end what they are at."""
    group = Group()
    raised = raised_in(group)
    error = failure_of(replay(Shard(raised), Shard("done", after_s=0.2)), group)
    assert error.failures == (raised,) and not error.breaks
    assert (group.aborted, group.killed) == ([], [])


def test_a_graph_that_is_closed_while_its_failures_are_looked_at_is_told_by_its_result() -> None:
    class Closed(Shard):
        def failures(self, submitted: object) -> list[WorkerFailure]:
            self.outcome = KeyError("what closed it")
            raise RayChannelError("closed")

    error = failure_of(replay(Closed()), Group())
    assert error.breaks and "what closed it" in str(error)


def test_a_death_that_closed_an_edge_is_found_and_its_peers_are_freed() -> None:
    """The error of an edge does not say whose it was."""
    group = Group(reports=(BUSY, DIED, IDLE))
    group.rank_of_actor = lambda actor_id: None  # type: ignore[method-assign, assignment, return-value]
    error = failure_of(replay(Shard(RayChannelError("closed"))), group)
    assert [(failure.rank, failure.kind, failure.message) for failure in error.failures] == [
        (1, "died", "its process ended")
    ]
    assert group.aborted == [0, 2] and error.breaks


def test_workers_of_another_role_are_told_apart() -> None:
    train, generation = Group(reports=(BUSY, IDLE, IDLE), stay=[0]), Group(reports=(IDLE, IDLE, BUSY))
    generation.role = SimpleNamespace(name="generation")
    error = failure_of(replay(Shard(), deadline_s=0.05), train, generation)
    assert [(failure.role, failure.rank) for failure in error.failures] == [("train", 0)]
    assert (train.aborted, train.killed, generation.aborted, generation.killed) == ([0], [0], [2], [])


def test_a_worker_that_does_not_answer_counts_as_in_the_replay_and_one_that_died_as_dead() -> None:
    group = Group(reports=(NO_ANSWER, DIED, BUSY._replace(replay=7)), stay=[0, 1])
    error = failure_of(replay(Shard(), deadline_s=0.05), group)
    assert {(failure.rank, failure.kind) for failure in error.failures} == {(0, "hung"), (1, "died")}
    assert sorted(group.aborted) == sorted(group.killed) == [0, 1], "not who is at another replay of the phase"


def test_a_worker_of_somebody_else_that_hangs_is_said_to_be_left() -> None:
    group = Group(reports=(BUSY, IDLE, IDLE), stay=[0])
    group.owned = False
    (failure,) = failure_of(replay(Shard(), deadline_s=0.05), group).failures
    assert "made by somebody else, and is left as it is" in failure.message
    assert (failure.phase, failure.replay) == ("train_step", 0)


def test_what_raised_first_comes_first_whichever_shard_is_read_first() -> None:
    first, later = (dataclasses.replace(raised_in(Group()), time_ns=time_ns, rank=time_ns) for time_ns in (1, 2))
    error = failure_of(replay(Shard(later), Shard(first)), Group())
    assert error.failures == (first, later)


def test_a_failure_is_heard_while_another_worker_of_its_graph_hangs() -> None:
    """The peer waits for it in a collective; it has a grace time to come out, not the deadline of the replay."""
    raised = dataclasses.replace(Group().failure(2, "raised", "train[2].step", "ValueError: bad"), replay=0)
    started = time.monotonic()
    with pytest.raises(PhaseError) as caught:
        outcome_of(replay(Shard(come=[raised])))
    assert time.monotonic() - started < 60.0
    assert caught.value.failures == (raised,)


def test_who_failed_is_to_blame_also_when_the_outcome_is_asked_for_after_the_deadline() -> None:
    """The other worker waits for it in a collective: it hangs, but it is not why."""
    group = Group(reports=(IDLE, BUSY, IDLE), stay=(1,))
    error = failure_of(replay(Shard(None, come=[raised_in(group)]), deadline_s=0.0), group)
    assert error.failures[0].kind == "raised" and error.failures[0].message == raised_in(group).message


def raised_in(group: Group) -> WorkerFailure:
    return dataclasses.replace(group.failure(2, "raised", "train[2].step", "ValueError: bad"), replay=0)


def test_shards_that_go_on_after_a_failure_have_the_time_that_was_set() -> None:
    """Longer than others have once a graph is lost (0.3 s here); they are not aborted, and no graph is broken."""
    group = Group(reports=(BUSY, BUSY, IDLE))
    error = failure_of(replay(Shard(come=[raised_in(group)], outcome="done", after_s=1.0), grace_s=60.0), group)
    assert [failure.kind for failure in error.failures] == ["raised"] and not error.breaks
    assert (group.aborted, group.killed) == ([], [])


def test_the_time_after_a_failure_is_never_longer_than_the_replays_own() -> None:
    group = Group(reports=(IDLE, BUSY, IDLE))
    started = time.monotonic()
    error = failure_of(replay(Shard(come=[raised_in(group)]), deadline_s=0.5, grace_s=600.0), group)
    assert time.monotonic() - started < 60.0
    assert [failure.kind for failure in error.failures] == ["raised"] and group.aborted == [1]
    assert "timeouts.grace_s = 600 s after a worker raised, or its deadline if that is sooner" in error.breaks


def test_nobody_waits_for_the_rest_once_a_graph_is_lost_however_long_shards_would_have() -> None:
    """One raised, another died: nothing can be saved by waiting."""
    group = Group(reports=(BUSY, DIED, IDLE))
    shards = Shard(come=[raised_in(group)]), Shard(RayActorError(), after_s=0.3)
    started = time.monotonic()
    error = failure_of(replay(*shards, grace_s=600.0), group)
    assert time.monotonic() - started < 60.0
    assert {failure.kind for failure in error.failures} == {"raised", "died"} and error.breaks


def test_what_broke_a_graph_is_told_and_not_that_others_were_not_done_yet() -> None:
    group = Group(reports=(BUSY, IDLE, IDLE), stay=[0])
    error = failure_of(replay(Shard(ValueError("cannot unpickle the result")), Shard()), group)
    assert "cannot unpickle the result" in str(error) and "hung" not in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert (group.aborted, group.killed) == ([0], [])


def test_results_come_in_the_order_of_the_shards() -> None:
    shards = [Shard("slow", after_s=0.3), Shard("quick"), Shard("middle", after_s=0.15)]
    assert [packets[0].value for packets in outcome_of(replay(*shards))] == ["slow", "quick", "middle"]


def test_a_plain_call_whose_answer_or_error_cannot_be_read_names_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(ref: object) -> None:
        raise UnserializableException("Original exception: ValueError: of the worker")

    monkeypatch.setattr("dagrl.worker_group.ray.get", get)
    group: Any = Group()
    failure = worker_group._result(None, group, 2, "forward")
    assert (failure.rank, failure.kind, failure.node) == (2, "raised", "forward")
    assert failure.message.startswith("what came of it cannot be read: ")
    assert "ValueError: of the worker" in failure.traceback


def test_a_plain_calls_error_without_a_message_names_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutWords(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def get(ref: object) -> None:
        raise RayTaskError("forward", "the stack", WithoutWords())

    monkeypatch.setattr("dagrl.worker_group.ray.get", get)
    group: Any = Group()
    failure = worker_group._result(None, group, 2, "forward")
    assert failure.message == "WithoutWords, of which str() raised RuntimeError"
    assert "the stack" in failure.traceback
