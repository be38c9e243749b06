"""A hang is noticed by what its phase took so far, and what only takes longer than usual is not taken for one."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dagrl.errors import PhaseError
from dagrl.runtime.phase import Shard, phase
from dagrl.runtime.schedule import Scheduler
from tests.integration.fake_workers import FakeWorker
from tests.integration.schedules import compiled, group_of

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
