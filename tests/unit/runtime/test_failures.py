"""Outcomes of replays and deadlines: who is named, released and killed, and what can be read again."""

from __future__ import annotations

import dataclasses
import logging
import math
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from ray.exceptions import RayActorError, RayChannelError, RayTaskError, UnserializableException

from dagrl.errors import CheckpointError, DeadlineError, PhaseError, RunError, WorkerError, WorkerFailure, error_text
from dagrl.runtime import failures
from dagrl.runtime.deadline import BackgroundThread, Deadline, within
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.executors import node as nodes
from dagrl.runtime.executors.node import NodeCall, Report, Take, drain_runs, failed_packet, install, run_node
from dagrl.runtime.failures import PendingReplay, collect_outcome
from dagrl.runtime.replay import ReplayTiming, computing_s
from dagrl.runtime.worker_group import WorkerGroup, call_together, gather

HEADER = Header("train_step", 0, False, {"train": 0}, 10.0)


class Shard:
    """A graph that gives a result or an error, or nothing until its worker is released."""

    def __init__(self, outcome: Any = None, after_s: float = 0.0, arrived: Sequence[WorkerFailure] = ()) -> None:
        self.outcome, self.ready, self.arrived = outcome, time.monotonic() + after_s, arrived

    def fetch(self, submitted: object, timeout_s: float) -> Packet:
        left = self.ready - time.monotonic() if self.outcome is not None else float("inf")
        time.sleep(max(0.0, min(left, timeout_s)))
        if left > timeout_s:
            raise TimeoutError
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if isinstance(self.outcome, WorkerFailure):
            return Packet(HEADER, None, failures=(self.outcome,))
        return Packet(HEADER, self.outcome)

    @property
    def executable(self) -> Shard:
        return self

    def failures(self, submitted: object) -> list[WorkerFailure]:
        return list(self.arrived)


DIED, IDLE, NO_ANSWER = nodes.DIED, nodes.IDLE, nodes.NO_ANSWER
BUSY = Report("train_step", 0, "train[0].step", "a stack", running_s=9.0)
ELSEWHERE = Report("generate", 7, "generate", "another stack")


class Group:
    """Three train workers. Aborted ones leave their collective, if they are in one."""

    owned = answers_while_busy = True
    rank_of_actor = Mock(return_value=1)

    def __init__(self, *hung: Shard, reports: Sequence[Report] = (IDLE, IDLE, IDLE), stay: Sequence[int] = ()) -> None:
        self.role = SimpleNamespace(name="train")
        self.layout = SimpleNamespace(coordinates=lambda rank: f"dp {rank}", world_size=3)
        self.locations = [SimpleNamespace(host="here", pid=rank) for rank in range(3)]
        self.actors = [SimpleNamespace(_actor_id=object()) for _ in range(3)]
        self.hung, self.now, self.stay = hung, dict(enumerate(reports)), stay
        self.aborted, self.killed = list[int](), list[int]()

    failure = WorkerGroup.failure  # type: ignore[assignment]

    def reports(self, timeout_s: float) -> dict[int, Report]:
        return dict(self.now)

    def abort(self, ranks: Sequence[int]) -> None:
        self.aborted += ranks
        self.now |= {rank: IDLE for rank in ranks if rank not in self.stay}
        for shard in self.hung:
            shard.outcome, shard.ready = "aborted", time.monotonic()

    def kill(self, ranks: Sequence[int]) -> None:
        self.killed += ranks


def replay(*shards: Shard, deadline_s: float = 600.0, grace_s: float = 0.3, hang_s: float = math.inf) -> PendingReplay:
    submitted: Any = [(shard, None) for shard in shards]
    return PendingReplay("train_step", 0, submitted, {}, time.monotonic() + deadline_s, grace_s, "timeouts", hang_s)


def outcome_of(replay: PendingReplay, *groups: Any, **options: float) -> Any:
    replay.groups = {group.role.name: group for group in groups}
    return collect_outcome(replay, **options)


def failure_of(replay: PendingReplay, *groups: Any) -> PhaseError:
    with pytest.raises(PhaseError) as caught:
        outcome_of(replay, *groups)
    return caught.value


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "TURN_S", 0.02)
    monkeypatch.setattr(failures, "GRACE_S", 0.1)
    monkeypatch.setattr(failures, "RELEASE_S", 0.1)


@pytest.mark.parametrize(
    ("reports", "stay", "failed", "aborted", "killed"),
    [
        ((BUSY, BUSY, IDLE), [1], {(1, "hung")}, [0, 1], [1]),
        ((BUSY, IDLE, BUSY), [], {(0, "hung"), (2, "hung")}, [0, 2], []),
        ((ELSEWHERE, BUSY, IDLE), [1], {(1, "hung")}, [1], [1]),
        ((NO_ANSWER, DIED, BUSY._replace(replay=7)), [0, 1], {(0, "hung"), (1, "died")}, [0, 1], [0, 1]),
    ],
    ids=["one stays", "all leave", "one is in another phase", "one does not answer, one died, one is in another replay"],
)
def test_a_hang_aborts_the_replays_workers_and_kills_those_that_stay(
    reports: Sequence[Report], stay: Sequence[int], failed: set[tuple[int, str]], aborted: list[int], killed: list[int]
) -> None:
    group = Group(reports=reports, stay=stay)
    error = failure_of(replay(Shard(), deadline_s=0.05), group)
    assert {(failure.rank, failure.kind) for failure in error.failures} == failed and error.breaks
    assert all(one.traceback == "a stack" for one in error.failures if reports[one.rank] == BUSY)
    assert (sorted(group.aborted), sorted(group.killed)) == (aborted, killed)


def test_workers_are_checked_before_they_are_killed_even_if_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that waits may itself be descheduled for longer than the workers have."""
    monkeypatch.setattr(failures, "RELEASE_S", 1e-9)
    group = Group(reports=(BUSY, BUSY, IDLE), stay=[1])
    failure_of(replay(Shard(), deadline_s=0.05), group)
    assert (group.aborted, group.killed) == ([0, 1], [1])


class Stopped(Group):
    """Worker 1 does not answer, as one that was stopped, until it was asked so many times."""

    def __init__(self, silent: float, *hung: Shard) -> None:
        super().__init__(*hung, reports=(BUSY, NO_ANSWER, IDLE), stay=[1])
        self.silent, self.asked = silent, 0

    def reports(self, timeout_s: float) -> dict[int, Report]:
        self.asked += 1
        if self.asked > self.silent:
            self.now[1] = IDLE
        return super().reports(timeout_s)


def test_a_worker_that_does_not_answer_hangs_long_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "QUESTION_S", 0.05)
    group = Stopped(math.inf)
    error = failure_of(replay(Shard(), hang_s=0.1), group)
    assert [(failure.rank, failure.kind) for failure in error.failures] == [(1, "hung")]
    assert (group.aborted, group.killed) == ([0, 1], [1]), "its peer is released from their collective"
    assert "hung in phase 'train_step', replay 0: does not answer" in str(error) and "timeouts.hang_factor" in str(error)


def test_a_worker_that_answers_late_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "QUESTION_S", 0.05)
    group = Stopped(4, Shard())
    assert outcome_of(replay(Shard("done", after_s=0.6), hang_s=0.5), group) == [Packet(HEADER, "done")]
    assert group.asked >= 5 and not group.killed


def test_only_workers_inside_the_replay_can_hang() -> None:
    group = Group(reports=(ELSEWHERE, BUSY, IDLE), stay=[1])
    error = failure_of(replay(Shard(), hang_s=0.1), group)
    assert [(failure.rank, failure.kind) for failure in error.failures] == [(1, "hung")]
    group = Group(reports=(ELSEWHERE, IDLE, IDLE))
    with pytest.raises(DeadlineError, match="no result yet"):
        outcome_of(replay(Shard(), hang_s=0.1), group, until=time.monotonic() + 0.4)
    assert not group.killed


def test_busy_workers_that_cannot_answer_do_not_hang() -> None:
    """Actors of others answer between their calls alone, unless they have a concurrency group for it."""
    group = Group(reports=(NO_ANSWER, NO_ANSWER, IDLE))
    group.answers_while_busy = False
    with pytest.raises(DeadlineError, match="no result yet"):
        outcome_of(replay(Shard(), hang_s=0.1), group, until=time.monotonic() + 0.3)


def test_hangs_do_not_count_time_while_the_driver_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watch = failures.HangWatch(10.0)
    for at in (1.0, 2.0, 3600.0, 3601.0):
        now[0] = at
        assert not watch.due()
    assert watch.waited_s == 4.0


def test_hangs_do_not_count_time_without_a_processor() -> None:
    """Nor for its peers, which wait for it."""
    watch = failures.HangWatch(10.0)
    starved, waiting = ("train", 0), ("train", 1)
    for at, starved_s in ((5.0, 7.0), (16.0, 17.5)):
        watch.waited_s = at
        assert not watch.hung({starved: BUSY._replace(starved_s=starved_s), waiting: BUSY})
    watch.waited_s += 10.0
    assert watch.hung({starved: BUSY._replace(starved_s=17.5), waiting: BUSY}) == {starved, waiting}


def test_a_replay_that_missed_its_turn_names_the_phase_before_it() -> None:
    group = Group(reports=(ELSEWHERE, ELSEWHERE, IDLE))
    error = failure_of(replay(Shard(), deadline_s=0.05), group)
    assert error.failures == () and error.breaks
    assert "no worker runs it (they run 'generate', which comes before it)" in str(error)
    assert (group.aborted, group.killed) == ([], [])


def test_an_interrupt_while_ray_raises_is_an_interrupt() -> None:
    interrupted = SystemError("<class 'GetTimeoutError'> returned a result with an exception set")
    interrupted.__cause__ = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        outcome_of(replay(Shard(interrupted)), Group())


def test_results_can_be_asked_for_again_and_keep_the_order_of_shards() -> None:
    first, second = Shard(), Shard("second")
    asked = replay(first, second)
    with pytest.raises(DeadlineError, match="Ask again"):
        outcome_of(asked, Group(), until=time.monotonic() + 0.05)
    first.outcome, first.ready = "first", time.monotonic() + 0.2
    assert [packet.value for packet in outcome_of(asked, Group())] == ["first", "second"]


def test_a_death_releases_a_shard_that_hangs() -> None:
    hung = Shard()
    group = Group(hung)
    started = time.monotonic()
    error = failure_of(replay(hung, Shard(RayActorError(), after_s=0.05), Shard("done")), group)
    assert time.monotonic() - started < 60.0  # not the deadline of the replay
    assert [(failure.rank, failure.kind) for failure in error.failures] == [(1, "died")]
    assert group.aborted == [0, 2]


def test_a_graph_that_closes_while_failures_are_read_reports_its_error() -> None:
    class Closed(Shard):
        def failures(self, submitted: object) -> list[WorkerFailure]:
            self.outcome = KeyError("what closed it")
            raise RayChannelError("closed")

    error = failure_of(replay(Closed()), Group())
    assert error.breaks and "what closed it" in str(error)


def test_a_death_behind_a_closed_edge_is_found_and_its_peers_released() -> None:
    """The error of an edge does not say whose edge it is."""
    group = Group(reports=(BUSY, DIED, IDLE))
    group.rank_of_actor = Mock(return_value=None)
    error = failure_of(replay(Shard(RayChannelError("closed"))), group)
    assert [(one.rank, one.kind, one.message) for one in error.failures] == [(1, "died", "its process ended")]
    assert group.aborted == [0, 2] and error.breaks


def test_workers_of_another_role_are_told_apart() -> None:
    train, generation = Group(reports=(BUSY, IDLE, IDLE), stay=[0]), Group(reports=(IDLE, IDLE, BUSY))
    generation.role = SimpleNamespace(name="generation")
    error = failure_of(replay(Shard(), deadline_s=0.05), train, generation)
    assert [(failure.role, failure.rank) for failure in error.failures] == [("train", 0)]
    assert (train.aborted, train.killed, generation.aborted, generation.killed) == ([0], [0], [2], [])


def test_a_hung_worker_of_another_owner_is_reported_as_left_running() -> None:
    group = Group(reports=(BUSY, IDLE, IDLE), stay=[0])
    group.owned = False
    (failure,) = failure_of(replay(Shard(), deadline_s=0.05), group).failures
    assert "dagrl did not create it and leaves it running" in failure.message
    assert (failure.phase, failure.replay) == ("train_step", 0)


def test_the_earliest_exception_comes_first() -> None:
    first, later = (dataclasses.replace(raised_in(Group()), time_ns=time_ns, rank=time_ns) for time_ns in (1, 2))
    error = failure_of(replay(Shard(later), Shard(first)), Group())
    assert error.failures == (first, later)


@pytest.mark.parametrize(("role", "key"), [("train", "train_micro_batch_size"), ("generation", "kv_cache_memory_bytes")])
def test_a_full_gpu_has_advice(role: str, key: str) -> None:
    message = error_text(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 304.00 MiB"))
    failed = dataclasses.replace(Group().failure(0, "raised", "step", message), role=role)
    assert key in str(failure_of(replay(Shard(failed)), Group())).splitlines()[-1]
    assert key not in str(WorkerError((dataclasses.replace(failed, message="ValueError: bad"),)))


def raised_in(group: Group) -> WorkerFailure:
    return dataclasses.replace(group.failure(2, "raised", "train[2].step", "ValueError: bad"), replay=0)


@pytest.mark.parametrize(("deadline_s", "grace_s", "says"), [(600.0, 0.3, "0.3"), (0.0, 0.3, "0.3"), (0.5, 600.0, "600")])
def test_peers_of_a_worker_that_raised_are_released_but_not_killed(deadline_s: float, grace_s: float, says: str) -> None:
    """Over NCCL, an abort in the worker itself does not reach them. They have the grace time, within the deadline."""
    group = Group(reports=(IDLE, BUSY, IDLE), stay=[1])
    started = time.monotonic()
    error = failure_of(replay(Shard(arrived=[raised_in(group)]), deadline_s=deadline_s, grace_s=grace_s), group)
    assert time.monotonic() - started < 60.0
    assert [(failure.kind, failure.message) for failure in error.failures] == [("raised", "ValueError: bad")]
    assert (group.aborted, group.killed) == ([1], [])
    assert f"timeouts.grace_s = {says} s after a worker raised, or its deadline if that is sooner" in error.breaks


@pytest.mark.parametrize(
    "shards",
    [
        lambda raised: (Shard(raised), Shard("done", after_s=0.2)),
        lambda raised: (Shard("done", after_s=0.4, arrived=[raised]),),
    ],
    ids=["another shard", "its own"],
)
def test_other_workers_get_the_grace_time_after_a_failure(shards: Callable[[WorkerFailure], Sequence[Shard]]) -> None:
    """They get longer than after a broken graph (0.1 s here). They are not aborted, and no graph is broken."""
    group = Group(reports=(BUSY, BUSY, IDLE))
    raised = raised_in(group)
    error = failure_of(replay(*shards(raised), grace_s=60.0), group)
    assert error.failures == (raised,) and not error.breaks
    assert (group.aborted, group.killed) == ([], [])


def test_nothing_waits_for_other_shards_once_a_graph_is_lost() -> None:
    """One worker raised, another died: waiting cannot save the replay."""
    group = Group(reports=(BUSY, DIED, IDLE))
    shards = Shard(arrived=[raised_in(group)]), Shard(RayActorError(), after_s=0.1)
    started = time.monotonic()
    error = failure_of(replay(*shards, grace_s=600.0), group)
    assert time.monotonic() - started < 60.0
    assert {failure.kind for failure in error.failures} == {"raised", "died"} and error.breaks


def test_a_broken_graph_does_not_blame_unfinished_workers() -> None:
    group = Group(reports=(BUSY, IDLE, IDLE), stay=[0])
    error = failure_of(replay(Shard(pickle.UnpicklingError("half a message")), Shard()), group)
    assert "UnpicklingError: half a message" in str(error) and "hung" not in str(error) and error.breaks
    assert isinstance(error.__cause__, pickle.UnpicklingError)
    assert (group.aborted, group.killed) == ([0], [])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UnserializableException("Original exception: the stack"), "its result cannot be read: "),
        (RayTaskError("forward", "the stack", KeyError("x")), "KeyError: 'x'"),
    ],
)
def test_failed_plain_calls_name_the_worker(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    monkeypatch.setattr("dagrl.runtime.worker_group.ray.get", Mock(side_effect=error))
    monkeypatch.setattr("dagrl.runtime.worker_group.ray.wait", lambda refs, timeout: (refs, []))
    group: Any = Group()
    group.actors = [SimpleNamespace(forward=SimpleNamespace(remote=object)) for _ in range(3)]
    with pytest.raises(WorkerError) as caught:
        call_together([(group, "forward", [()] * 3)], deadline=Deadline(1.0, "patience"))
    found = [(one.rank, one.kind, one.node, one.message[: len(message)]) for one in caught.value.failures]
    assert found == [(rank, "raised", "forward", message) for rank in range(3)]
    assert all("the stack" in failure.traceback for failure in caught.value.failures)


@pytest.mark.parametrize("dies", [True, False])
def test_a_death_comes_before_what_its_peers_raised(monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    """A checkpoint that fails because a peer died is reported as the death, not as a user error."""
    refused = RayTaskError("save", "the stack", CheckpointError("cannot write: Connection reset by peer"))
    refused.cause = CheckpointError("cannot write: Connection reset by peer")
    answers = Mock(side_effect=[refused, RayActorError() if dies else None])
    monkeypatch.setattr("dagrl.runtime.worker_group.ray.get", answers)
    monkeypatch.setattr("dagrl.runtime.worker_group.ray.wait", lambda refs, timeout: (refs[:1], refs[1:]))
    failure = WorkerGroup.failure.__get__(Group())
    with pytest.raises(WorkerError if dies else CheckpointError) as caught:
        gather([(failure, "save", ["first", "second"])], Deadline(1.0, "timeouts.checkpoint_s"))
    if dies:
        assert [(one.rank, one.kind) for one in caught.value.failures] == [(1, "died")]


def test_ranks_that_are_not_called_need_nothing_of_ray() -> None:
    """An object put for them would wait for the store of a raylet that hangs. No cluster runs here."""
    assert gather([(pytest.fail, "reset_tickets", [None, None])], Deadline(1.0, "timeouts.replay_s")) == [[None, None]]


CALL = NodeCall("train", "train[0].step", 0, "map", "step", (Take(0),), {}, 0, True, 1 << 20, "")

PACKET = Packet(Header("train_step", 0, False, {"train": 0}, 10.0), None)


class WithoutWords(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.fixture
def worker() -> Any:
    """Fails with an error whose own message fails, and so does its abort."""
    worker = SimpleNamespace(step=Mock(side_effect=WithoutWords), abort=Mock(side_effect=RuntimeError("the abort's error")))
    install(worker, "train", 3, "dp 3")
    return worker


def test_broken_messages_and_aborts_do_not_hide_the_failure(worker: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (failure,) = run_node(worker, CALL, PACKET).failures
    assert (failure.role, failure.rank) == ("train", 3)
    assert failure.message == "WithoutWords, whose str() raised RuntimeError" and "in run_node" in failure.traceback
    assert worker.abort.call_count == 1 and "the abort's error" in caplog.text


def test_a_restarted_worker_says_what_to_do() -> None:
    with pytest.raises(RunError, match=r"\(max_restarts\); make a new WorkerGroup of the actors"):
        drain_runs(SimpleNamespace(), "train")


def test_a_message_cut_within_a_character_can_be_written() -> None:
    assert error_text(ValueError("half: \ud83d")) == "ValueError: half: \\ud83d"


def test_a_worker_that_hears_of_failures_aborts_nothing(worker: Any) -> None:
    failed = failed_packet(worker, CALL, PACKET, ValueError("of another node"))
    assert run_node(worker, CALL, failed).failures == failed.failures
    assert not worker.abort.called


def test_overhead_counts_the_longest_shard_and_idleness_all() -> None:
    timing = ReplayTiming(started=10.0, finished=15.0, shards_busy_s=(4.0, 1.0), padding_share=None)
    assert (timing.busy_s, timing.mean_busy_s) == (4.0, 2.5)
    assert timing.overhead_s() == 1.0
    assert timing.overhead_s(free=10.5) == 0.5


def timed(finished: float, *busy: float) -> ReplayTiming:
    return ReplayTiming(0.0, finished, busy, None)


@pytest.mark.parametrize(
    ("replays", "seconds"),
    [
        ([], 0.0),
        ([timed(2.0, 1.0, 1.5), timed(5.0, 2.0), timed(9.0, 4.0)], 7.5),  # one after the other: the sum
        ([timed(5.0, 5.0), timed(7.0, 5.0)], 7.0),  # two groups at once
        ([timed(9.0, 8.0), timed(3.0, 1.0), timed(8.0, 1.0)], 8.0),  # some within another one
        ([timed(6.0, 0.0)], 0.0),
    ],
)
def test_every_second_with_a_worker_computing_counts_once(replays: list[ReplayTiming], seconds: float) -> None:
    assert computing_s(replays) == pytest.approx(seconds)
    assert computing_s(reversed(replays)) == pytest.approx(seconds)


raises = Mock(side_effect=ValueError("no such thing"))


def test_within_returns_or_raises_what_the_call_does() -> None:
    assert within(20.0, lambda: threading.current_thread().name, "asks") == "asks"
    with pytest.raises(ValueError, match="no such thing"):
        within(20.0, raises, "asks")


def test_a_call_that_does_not_end_is_abandoned() -> None:
    go_on = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.01, go_on.wait, "asks")
    thread = next(one for one in threading.enumerate() if one.name == "asks")
    assert thread.daemon
    go_on.set()
    thread.join(20.0)
    assert not thread.is_alive()


def test_a_background_thread_runs_calls_in_order_until_it_is_closed() -> None:
    background, done = BackgroundThread("asks"), list[int]()
    calls = [background.start(lambda n=n: done.append(n)) for n in range(3)]  # type: ignore[misc]
    with pytest.raises(ValueError, match="no such thing"):
        background.start(raises).result(20.0)
    thread = background.start(threading.current_thread)
    background.close()
    thread.result(20.0).join(20.0)
    assert thread.result().daemon and not thread.result().is_alive()
    assert done == [0, 1, 2] and all(call.done() for call in calls)


def test_a_background_thread_keeps_nothing_of_a_call() -> None:
    background, kept = BackgroundThread("asks"), threading.Event()
    gone = weakref.ref(kept)
    background.start(kept.is_set).result(20.0)
    del kept
    background.start(threading.current_thread).result(20.0)
    assert gone() is None
    background.close()
