"""Endurance: replays by the hundred thousand and recompilations by the hundred, at flat time and memory.

    python -m bench.endurance --json bench/results/endurance-worn.json

Two workers. First, replays of one phase: their median duration in the calmest thousand of the first and of the last tenth,
their processor time in all processes together, and the memory of these along the way. Whatever else runs on a shared machine
changes both times, so the worn graph is also measured against a fresh one, on new workers, in turns of some hundred replays.
The driver is the same for both: that nothing grows there either is counted by `tests/integration/test_replay_growth.py`.
Then cycles of compiling a phase with an edge of 64 MB between the workers, replaying it 50 times at its full size, and
tearing it down: time of the teardown, memory, semaphores and shared memory left behind.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import ray

from bench.overhead import bench_cluster
from bench.report import command_line, commit, hardware, versions
from bench.worker import BenchWorker
from dagrl.executors.node import drain_runs
from dagrl.layout import ParallelLayout
from dagrl.phase import Input, Shard, Value, phase
from dagrl.scheduler import Scheduler, SchedulerOptions
from dagrl.worker_group import WorkerGroup

WINDOW = 1000
TURNS, TURN = 40, 200  # of the worn graph and a fresh one
EDGE_BYTES = 64_000_000
PASSES = 50
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # what is looked into, not a temporary file


@phase
def every_worker(train: Shard, value: Input) -> Value:
    """Every worker gets the input; every result goes to the driver."""
    return train.map("step", value)


@phase
def pass_on(train: Shard, value: Input) -> Value:
    """A large result goes from the first worker to the second."""
    return train[1].map("size", train[0].map("step", value))


@dataclass(frozen=True)
class Replays:
    """`n` replays: microseconds of one at the start and at the end, and megabytes resident along the way.

    `cpu`: processor time of the driver and the workers together, their other threads included. `worn`: how many times as
    long a replay takes after all of them as one of a fresh graph on new workers, side by side.
    """

    n: int
    first_us: float
    last_us: float
    first_cpu_us: float
    last_cpu_us: float
    worn: float
    resident_mb: tuple[float, ...]


@dataclass(frozen=True)
class Cycles:
    """`n` cycles: the longest teardown, megabytes resident after each tenth, and what is left in `/dev/shm`."""

    n: int
    replays: int
    edge_bytes: int
    longest_teardown_s: float
    resident_mb: tuple[float, ...]
    left_semaphores: int
    left_shared_mb: float


def replays(group: WorkerGroup, count: int) -> Replays:
    """Time and memory of `count` replays, at least ten windows of a thousand."""
    seconds, cpu, resident = np.empty(count), [], []
    with _ready(group) as scheduler:
        for number in range(count):
            if number % WINDOW == 0:
                cpu.append(_cpu_s(group))
            seconds[number] = _one(scheduler)
            if number % max(WINDOW, count // 10) == WINDOW - 1:
                resident.append(_resident_mb(group))
        resident.append(_resident_mb(group))
        worn = _against_fresh(scheduler)
    tenth = max(WINDOW, count // 10)
    first, last = _calmest(seconds[WINDOW : WINDOW + tenth]), _calmest(seconds[-tenth:])
    taken = np.diff(cpu)[1:] / WINDOW  # of each window but the first
    first_cpu, last_cpu = taken[: tenth // WINDOW].min(), taken[-(tenth // WINDOW) :].min()
    return Replays(count, _us(first), _us(last), _us(first_cpu), _us(last_cpu), worn, tuple(resident))


def _us(seconds: float) -> float:
    return round(float(seconds) * 1e6, 1)


def _against_fresh(worn: Scheduler) -> float:
    """Median over turns of how many times as long a replay takes as one of a fresh graph; who comes first alternates."""
    group = two_workers()
    ratios = []
    with _ready(group) as fresh:
        for turn in range(TURNS + 1):
            medians = {}
            for one in (worn, fresh) if turn % 2 else (fresh, worn):
                medians[one] = float(np.median([_one(one) for _ in range(TURN)]))
            ratios.append(medians[worn] / medians[fresh])
    group.kill(range(group.layout.world_size))
    return round(float(np.median(ratios[1:])), 3)


@contextmanager
def _ready(group: WorkerGroup) -> Iterator[Scheduler]:
    with _scheduler(group, 1 << 16) as scheduler:
        scheduler.add(every_worker, warmup_value=b"x")
        scheduler.compile()
        scheduler.warmup()
        yield scheduler


def _one(scheduler: Scheduler) -> float:
    """Seconds of a replay."""
    started = time.perf_counter()
    scheduler.replay(every_worker, b"x").result()
    return time.perf_counter() - started


def cycles(group: WorkerGroup, count: int) -> Cycles:
    """What `count` cycles of compiling, replaying and tearing down take and leave."""
    group.call("set_result", EDGE_BYTES - (1 << 16))
    teardowns, resident, before = [], [], (0, 0.0)
    for cycle in range(count):
        scheduler = _scheduler(group, EDGE_BYTES)
        scheduler.add(pass_on, warmup_value=b"x")
        scheduler.compile()
        for _ in range(PASSES):
            assert scheduler.replay(pass_on, b"x").result() == (EDGE_BYTES - (1 << 16),)
        started = time.monotonic()
        scheduler.close()
        teardowns.append(time.monotonic() - started)
        if cycle == 0:
            before = _shared_memory()
        if cycle % max(1, count // 10) == 0 or cycle == count - 1:
            resident.append(_resident_mb(group))
    semaphores, shared_mb = _shared_memory()
    left = semaphores - before[0], round(shared_mb - before[1], 1)
    return Cycles(count, PASSES, EDGE_BYTES, round(max(teardowns), 3), tuple(resident), *left)


def _scheduler(group: WorkerGroup, result_bytes: int) -> Scheduler:
    return Scheduler([group], SchedulerOptions(fallback="error", result_bytes=result_bytes, compile_s=120.0))


def _calmest(seconds: npt.NDArray[np.float64]) -> float:
    """Seconds of a replay in the window of a thousand that other processes disturbed least."""
    starts = range(0, len(seconds) - WINDOW + 1, WINDOW)
    return min(float(np.median(seconds[start : start + WINDOW])) for start in starts)


def _cpu_s(group: WorkerGroup) -> float:
    """Processor time that the driver and the workers have used."""
    return time.process_time() + float(sum(group.call("cpu_s")))


def _resident_mb(group: WorkerGroup) -> float:
    """Memory of the driver and the workers, shared memory included, without what the workers' records of calls take."""
    gc.collect()
    group.call_function(_forget)
    pids = [os.getpid(), *group.call("pid")]
    return round(sum(_kilobytes(pid) for pid in pids) / 1e3, 1)


def _forget(worker: BenchWorker) -> None:
    drain_runs(worker)
    gc.collect()


def _kilobytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _shared_memory() -> tuple[int, float]:
    """Semaphores in `/dev/shm`, and megabytes in use there."""
    usage = os.statvfs(SHARED_MEMORY)
    semaphores = sum(entry.name.startswith("sem.") for entry in SHARED_MEMORY.iterdir())
    return semaphores, (usage.f_blocks - usage.f_bfree) * usage.f_frsize / 1e6


def two_workers() -> WorkerGroup:
    """Two workers that do nothing."""
    actor = ray.remote(num_cpus=0)(BenchWorker)
    return WorkerGroup.from_actors([actor.remote() for _ in range(2)], ParallelLayout(tp=2))


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="bench.endurance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replays", type=int, default=100_000)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, object] = {
        "hardware": hardware(),
        "versions": dict(versions()),
        "command": command_line(),
        "commit": commit(),
    }
    with bench_cluster():
        group = two_workers()
        for name, measure, count in (("replays", replays, options.replays), ("cycles", cycles, options.cycles)):
            found[name] = asdict(measure(group, count))
            print(name, found[name], flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
