"""A worker that dies or hangs, or is only late: one error that names it, nothing waits, survivors replay again."""

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dagrl.errors import DeadlineError, PhaseError, RunError, WorkerError
from dagrl.runtime.compile import Engine, executor_of
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.executors.base import Actors, Executable, GraphLimits, Nodes
from dagrl.runtime.graph import PhaseGraph
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Shard, phase
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.runtime.worker_group import WorkerGroup, call_together, shutdown_groups
from dagrl.workers.train.groups import abort_groups
from tests.integration.fake_workers import ENGINES, FakeWorker
from tests.integration.processes import ends_within
from tests.integration.schedules import compiled, group_of

SOON_S = 50.0
DEADLINE = Deadline(60.0, "patience")
"""For what takes seconds, on a machine that does other things: long before anything that hangs would be given up."""

TEARDOWN_S, WELL = 2.0, {"rank": -1}
ROLES = {"train": 2, "other": 1}
"""Ranks of the groups of a scheduler."""


@phase
def misbehave(train: Shard, how):
    return train.map("misbehave", how)


@phase
def other_ranks(other: Shard, value):
    return other.map("rank", value)


@pytest.fixture(params=["dagrl", "ray", pytest.param("eager", marks=pytest.mark.slow)])
def scheduler(request: pytest.FixtureRequest, cluster: None) -> Iterator[Scheduler]:
    groups = [WorkerGroup.create(role, FakeWorker, ParallelLayout(tp=size), None) for role, size in ROLES.items()]
    with compiled(
        groups, {misbehave: WELL, other_ranks: None}, **ENGINES[request.param], teardown_s=TEARDOWN_S
    ) as scheduler:
        yield scheduler
        started = time.monotonic()
    # teardown returns within its deadline, whatever is dead or hung; Ray alone would wait for 30 s
    assert time.monotonic() - started < 16.0
    for group in [*groups, *scheduler.groups.values()]:
        group.shutdown(2.0)


def test_a_lost_worker_is_named_and_the_others_live_on(scheduler: Scheduler) -> None:
    """A killed one, which is replaced; then a hung one, with its stack."""
    with pytest.raises(PhaseError) as caught:
        scheduler.replay(misbehave, {"rank": 1, "kind": "die"}).result()
    lost, failure = scheduler.groups["train"], caught.value.failures[0]
    assert (failure.role, failure.rank, failure.kind, failure.phase) == ("train", 1, "died", "misbehave")
    assert failure.pid == lost.locations[1].pid
    with pytest.raises(RunError, match="recover"):
        scheduler.replay(misbehave, WELL)
    lost.start_again([1])
    lost.join_again([1])
    scheduler.recover()
    scheduler.warmup()
    assert scheduler.replay(misbehave, WELL).result() == ([0, 1],)
    assert scheduler.replay(other_ranks, 1).result() == (0,)

    started = time.monotonic()
    with pytest.raises(PhaseError, match="replay_s") as caught:
        scheduler.replay(misbehave, {"rank": 0, "kind": "hang", "peers": "wait"}, deadline_s=1.0).result()
    assert time.monotonic() - started < SOON_S
    (failure,) = caught.value.failures
    assert (failure.rank, failure.kind) == (0, "hung")
    assert "time.sleep(3600)" in failure.traceback
    survivor = scheduler.groups["train"].actors[1]
    scheduler.close()
    with compiled(WorkerGroup.from_actors([survivor], ParallelLayout()), {misbehave: {}}, warm=False) as again:
        assert again.replay(misbehave, {}).result() == (1,)


@phase
def train_ranks(train: Shard, value):
    return train.map("rank", value)


@pytest.mark.parametrize("engine", ["dagrl", pytest.param("ray", marks=pytest.mark.slow)])
def test_only_the_shard_of_a_replaced_worker_is_compiled_again(cluster: None, monkeypatch: Any, engine: str) -> None:
    made: list[tuple[str, list[Any]]] = []

    def recording(name: str, engine: Engine) -> Any:
        def compile_(graph: PhaseGraph, actors: Actors, nodes: Nodes, limits: GraphLimits) -> Executable:
            made.append((graph.phase, list(actors["train"])))
            return executor(graph, actors, nodes, limits)

        executor = executor_of(name, engine)
        return compile_

    monkeypatch.setattr("dagrl.runtime.schedule.executor_of", recording)
    phases = {misbehave: WELL, train_ranks: None}
    with group_of(FakeWorker, dp=2, tp=2) as group, compiled(group, phases, **ENGINES[engine]) as scheduler:
        assert len(made) == 4
        made.clear()
        pids = [location.pid for location in group.locations]
        with pytest.raises(PhaseError, match=r"train worker 3 .* died"):
            scheduler.replay(misbehave, {"rank": 3, "kind": "die"}).result()
        group.start_again([3])
        group.join_again([3])
        assert scheduler.recover() == {"misbehave": [1], "train_ranks": [1]}
        assert made == [(name, list(group.actors[2:])) for name in ("misbehave", "train_ranks")]
        assert [now.pid == before for now, before in zip(group.locations, pids, strict=True)] == [True, True, True, False]
        scheduler.warmup()
        for _ in range(3):
            assert scheduler.replay(misbehave, WELL).result() == ([0, 1], [2, 3])
            assert scheduler.replay(train_ranks).result() == ([0, 1], [2, 3])


@pytest.mark.parametrize("engine", ["dagrl", pytest.param("ray", marks=pytest.mark.slow)])
def test_compiling_with_a_worker_that_does_not_answer_ends(cluster: None, monkeypatch: Any, engine: str) -> None:
    """It stops once the graph's loops are about to start. Ray's engine would wait for it without end."""
    group = WorkerGroup.create("train", FakeWorker, ParallelLayout(dp=1, tp=2), None)
    module = importlib.import_module(f"dagrl.runtime.executors.{engine}_engine")
    nodes_of, prepare, stopped = module.nodes_of, getattr(module, "prepare_workers", None), group.locations[1].pid

    def stop_after(*arguments: Any) -> Any:
        done = (prepare or nodes_of)(*arguments)
        os.kill(stopped, signal.SIGSTOP)
        return done

    monkeypatch.setattr(module, "nodes_of" if prepare is None else "prepare_workers", stop_after)
    options = SchedulerOptions(**ENGINES[engine], fallback="error", compile_s=3.0, teardown_s=TEARDOWN_S)
    with Scheduler([group], options) as scheduler:
        scheduler.add(misbehave, warmup_value=WELL)
        started = time.monotonic()
        with pytest.raises(RunError, match=r"within compile_s = 3 s: a worker does not answer"):
            scheduler.compile()
        assert time.monotonic() - started < SOON_S
    os.kill(stopped, signal.SIGKILL)
    group.shutdown(2.0)


class Adding(FakeWorker):
    """Adds ones up over all workers in a collective of Gloo, unless told to raise before it."""

    def setup(self, address: str) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        limit, size = timedelta(seconds=100), self.context.layout.world_size
        dist.init_process_group(
            "gloo", init_method=f"tcp://{address}", rank=self.context.rank, world_size=size, timeout=limit
        )

    def abort(self) -> None:
        abort_groups()

    def add(self, raises: int) -> int:
        import torch

        if self.context.rank == raises:
            raise ValueError("told to raise")
        ones = torch.ones(1)
        torch.distributed.all_reduce(ones)
        return int(ones)


@phase
def add_up(train: Shard, raises):
    return train.map("add", raises)


def check_freed(group: WorkerGroup, engine: str) -> None:
    with compiled(group, {add_up: -1}, warm=False, **ENGINES[engine], replay_s=90.0) as scheduler:
        assert scheduler.replay(add_up, -1).result() == (2, 2)
        started = time.monotonic()
        with pytest.raises(PhaseError) as caught:
            scheduler.replay(add_up, 1).result()
        assert time.monotonic() - started < 45.0  # half of the deadlines of the replay and of the collective
        cause, freed = caught.value.failures
        assert (cause.rank, cause.kind, cause.message) == (1, "raised", "ValueError: told to raise")
        assert (freed.rank, freed.kind) == (0, "raised") and "all_reduce" in freed.traceback
        group.setup()
        assert scheduler.replay(add_up, -1).result() == (2, 2)  # nobody died, and the graphs are whole


def test_a_collective_that_waits_for_a_shard_that_raised_is_freed(cluster: None) -> None:
    with group_of(Adding, dp=2) as group:
        for engine in ENGINES:
            check_freed(group, engine)


class Parting(FakeWorker):
    """Shuts down once those of the other role do."""

    def shutdown(self) -> None:
        directory, other = Path(str(self.config)), {"train": "other", "other": "train"}[self.context.role]
        (directory / self.context.role).touch()
        met = ends_within(30.0, lambda: not (directory / other).exists())
        (directory / f"{self.context.role} met").write_text(str(met))


def test_groups_shut_down_side_by_side(cluster: None, tmp_path: Path) -> None:
    groups = [WorkerGroup.create(role, Parting, ParallelLayout(), tmp_path) for role in ("train", "other")]
    shutdown_groups(groups, 60.0)
    assert [(tmp_path / f"{role} met").read_text() for role in ("train", "other")] == ["True", "True"]


@pytest.fixture
def group(cluster: None) -> Iterator[WorkerGroup]:
    with group_of(FakeWorker, dp=2) as group:
        yield group


def test_a_worker_that_dies_in_a_plain_call_is_named_before_those_that_it_makes_fail(group: WorkerGroup) -> None:
    calls = [({"rank": 0, "kind": "raise"},), ({"rank": 1, "kind": "die"},)]
    with pytest.raises(
        WorkerError, match=rf"^train worker 1 .*pid {group.locations[1].pid}\) died in 'misbehave'"
    ) as caught:
        call_together([(group, "misbehave", calls)], deadline=DEADLINE)
    assert [(failure.rank, failure.kind) for failure in caught.value.failures] == [(1, "died"), (0, "raised")]
    assert "told to raise" in caught.value.failures[1].message


def test_a_failed_plain_call_does_not_wait_for_a_worker_that_hangs(group: WorkerGroup) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError, match="told to raise"):
        calls = [({"rank": 0, "kind": "raise"},), ({"rank": 1, "kind": "hang"},)]
        call_together([(group, "misbehave", calls)], deadline=DEADLINE)
    assert time.monotonic() - started < SOON_S


def test_a_plain_call_past_its_deadline_names_the_late_worker(group: WorkerGroup) -> None:
    late = rf"^train worker 1 .*pid {group.locations[1].pid}\) is still in 'misbehave': no answer within patience = 1 s"
    with pytest.raises(DeadlineError, match=late):
        group.call("misbehave", {"rank": 1, "kind": "hang"}, deadline=Deadline(1.0, "patience"))


SLEEP, COMPUTE, KEEP_INTERPRETER = "sleep", "compute", "keep the interpreter"
USUAL_S = 0.3
FACTOR, FLOOR_S = 10.0, 10.0  # those of `timeouts`


class Worker(FakeWorker):
    def spend(self, how: tuple[str, float]) -> int:
        kind, seconds = how
        if kind == KEEP_INTERPRETER:  # as native code may, such as a capture of a CUDA graph
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        elif kind == COMPUTE:
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                pass
        else:
            time.sleep(seconds)
        return self.context.rank


@phase
def spend(train: Shard, how):
    return train.map("spend", how)


@contextmanager
def running(floor_s: float, factor: float = FACTOR) -> Iterator[Scheduler]:
    """Starts two workers that have replayed once, for `USUAL_S`."""
    with (
        group_of(Worker, tp=2) as group,
        compiled(group, {spend: (SLEEP, 0.0)}, hang_factor=factor, hang_floor_s=floor_s) as scheduler,
    ):
        scheduler.replay(spend, (COMPUTE, USUAL_S)).result()
        yield scheduler


def stop(scheduler: Scheduler) -> int:
    """Stops train worker 1. The kernel stops its threads one by one, as each is next scheduled, so wait for all of them."""
    pid = scheduler.groups["train"].locations[1].pid
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    while any(state(task) != "T" for task in tasks.iterdir()):
        time.sleep(0.01)
    return pid


def state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def test_a_stopped_worker_is_named_and_killed_after_the_floor(cluster: None) -> None:
    with running(floor_s=4.0, factor=0.1) as scheduler:
        stop(scheduler)
        started = time.monotonic()
        with pytest.raises(PhaseError, match=r"train worker 1 .* hung") as caught:
            scheduler.replay(spend, (SLEEP, 0.0)).result()
        assert 4.0 < time.monotonic() - started < 30.0
        assert [failure.rank for failure in caught.value.failures] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SLEEP, KEEP_INTERPRETER])
def test_slow_workers_that_are_paused_or_cannot_answer_for_a_while_do_not_hang(cluster: None, kind: str) -> None:
    """A replay of 7 s, in which a worker is stopped for 4 s. Workers are first asked after 5 s."""
    with running(FLOOR_S) as scheduler:
        replay = scheduler.replay(spend, (kind, 7.0))
        time.sleep(4.0)
        pid = stop(scheduler)
        threading.Timer(4.0, os.kill, [pid, signal.SIGCONT]).start()
        assert replay.result() == ([0, 1],)


@pytest.mark.slow
def test_thirty_busy_processes_make_no_hang(cluster: None) -> None:
    """Replays take 16 times as long on two cores, more than the limit."""
    with running(floor_s=1.0, factor=4.0) as scheduler:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(30)]
        try:
            for _ in range(3):
                assert scheduler.replay(spend, (COMPUTE, USUAL_S)).result() == ([0, 1],)
        finally:
            for process in busy:
                process.kill()


@pytest.mark.slow
def test_the_first_replay_of_new_graphs_may_take_its_time(cluster: None) -> None:
    with running(floor_s=1.0) as scheduler:
        scheduler.groups["train"].start_again([1])
        scheduler.groups["train"].join_again([1])
        scheduler.recover()
        assert scheduler.replay(spend, (SLEEP, 12.0)).result() == ([0, 1],)
