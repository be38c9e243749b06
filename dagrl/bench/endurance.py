"""Endurance: 100,000 replays and 100 recompilations, at constant time and memory.

    python -m dagrl.bench.endurance --json bench/results/endurance-worn.json

Runs on two workers. The first part replays one phase and reports, for the first and the last tenth of the replays, the
median duration in the calmest window of a thousand, the processor time of all processes, and memory along the way. Other
load on a shared machine changes both times by 10 % and more, so two further numbers do without a clock: the Python calls of
the driver in a replay, and turns of a few hundred replays on the worn graph and on a fresh one with new workers. Both graphs
use the same driver; `tests/integration/test_replay_growth.py` checks that nothing grows there.
The second part compiles a phase with a 64 MB edge between the workers, replays it 50 times at full size and tears it down,
in cycles. It reports teardown time, memory, and the semaphores and shared memory left over.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import ray

from dagrl.bench.overhead import bench_cluster
from dagrl.bench.report import Row, add_outputs, write_result
from dagrl.bench.variants import scatter_gather
from dagrl.bench.worker import BenchWorker
from dagrl.machine import DEV_SHM
from dagrl.runtime.executors.node import drain_runs
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.options import SchedulerOptions
from dagrl.runtime.phase import Input, Shard, Value, phase
from dagrl.runtime.schedule import Scheduler
from dagrl.runtime.worker_group import WorkerGroup

WINDOW = 1000
TURNS, TURN = 40, 200  # turns, and replays per turn, of the worn and the fresh graph
EDGE_BYTES = 64_000_000
PASSES = 50


@phase
def pass_on(train: Shard, value: Input) -> Value:
    """Sends a large result from the first worker to the second."""
    return train[1].map("size", train[0].map("step", value))


def replays(group: WorkerGroup, count: int) -> Row:
    """Measures `count` replays, at least ten windows of a thousand: microseconds per replay, resident megabytes on the way.

    `*_cpu_us` is the processor time of the driver and the workers together, all threads included. `*_calls` are the
    Python and C functions that the driver calls in a replay, the fewest of many. `worn` is the duration of a replay
    after `count` replays over that of a fresh graph on new workers, measured side by side. `descriptors` and `threads`
    are those of the driver and the workers, at the start and at the end.
    """
    seconds, cpu, resident = np.full(count, np.nan), [], []  # its memory is taken now, and is no growth
    with _ready(group) as scheduler:
        for _ in range(WINDOW):
            _one(scheduler)
        calls, held = [_calls(scheduler)], [_held(group)]
        for number in range(count):
            if number % WINDOW == 0:
                cpu.append(_cpu_s(group))
            seconds[number] = _one(scheduler)
            if number % max(WINDOW, count // 10) == WINDOW - 1:
                resident.append(_resident_mb(group))
        resident.append(_resident_mb(group))
        calls.append(_calls(scheduler))
        held.append(_held(group))
        worn = _against_fresh(scheduler)
    tenth = max(WINDOW, count // 10)
    first, last = _calmest(seconds[WINDOW : WINDOW + tenth]), _calmest(seconds[-tenth:])
    taken = np.diff(cpu)[1:] / WINDOW  # per window, without the first
    first_cpu, last_cpu = taken[: tenth // WINDOW].min(), taken[-(tenth // WINDOW) :].min()
    times = {"first_us": first, "last_us": last, "first_cpu_us": first_cpu, "last_cpu_us": last_cpu}
    descriptors, threads = zip(*held, strict=True)
    return {
        "n": count,
        **{name: round(float(seconds) * 1e6, 1) for name, seconds in times.items()},
        "first_calls": calls[0],
        "last_calls": calls[1],
        "worn": worn,
        "descriptors": descriptors,
        "threads": threads,
        "resident_mb": resident,
    }


def _calls(scheduler: Scheduler) -> int:
    """Returns the functions that this thread calls in a replay: the fewest of a turn, as a reader that waits looks again."""
    count, counts = 0, []

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(TURN):
        count = 0
        sys.setprofile(called)
        _one(scheduler)
        sys.setprofile(None)
        counts.append(count)
    return min(counts)


def _held(group: WorkerGroup) -> tuple[int, int]:
    """Returns the open descriptors and the threads of the driver and the workers."""
    places = [Path(f"/proc/{pid}") for pid in (os.getpid(), *group.call("pid"))]
    return tuple(sum(len(os.listdir(place / part)) for place in places) for part in ("fd", "task"))  # type: ignore[return-value]


def _against_fresh(worn: Scheduler) -> float:
    """Returns the median ratio of a replay's duration to that on a fresh graph, over turns that alternate in order."""
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
        scheduler.add(scatter_gather, warmup_value=b"x")
        scheduler.compile()
        scheduler.warmup()
        yield scheduler


def _one(scheduler: Scheduler) -> float:
    """Returns the seconds of one replay."""
    started = time.perf_counter()
    scheduler.replay(scatter_gather, b"x").result()
    return time.perf_counter() - started


def cycles(group: WorkerGroup, count: int) -> Row:
    """Measures `count` cycles of compiling, replaying and tearing down: the longest teardown, resident megabytes after each
    tenth, and what is left in `/dev/shm`."""
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
    return {
        "n": count,
        "replays": PASSES,
        "edge_bytes": EDGE_BYTES,
        "longest_teardown_s": round(max(teardowns), 3),
        "resident_mb": resident,
        "left_semaphores": semaphores - before[0],
        "left_shared_mb": round(shared_mb - before[1], 1),
    }


def _scheduler(group: WorkerGroup, result_bytes: int) -> Scheduler:
    return Scheduler([group], SchedulerOptions(fallback="error", result_bytes=result_bytes, compile_s=120.0))


def _calmest(seconds: npt.NDArray[np.float64]) -> float:
    """Returns the median seconds per replay in the window of a thousand with the least disturbance."""
    starts = range(0, len(seconds) - WINDOW + 1, WINDOW)
    return min(float(np.median(seconds[start : start + WINDOW])) for start in starts)


def _cpu_s(group: WorkerGroup) -> float:
    """Returns the processor time of the driver and the workers."""
    return time.process_time() + float(sum(group.call("cpu_s")))


def _resident_mb(group: WorkerGroup) -> float:
    """Returns resident memory of the driver and the workers, including shared memory, without the workers' trace buffers."""
    gc.collect()
    group.call_function(_forget, group.role.name)
    pids = [os.getpid(), *group.call("pid")]
    return round(sum(_kilobytes(pid) for pid in pids) / 1e3, 1)


def _forget(worker: BenchWorker, role: str) -> None:
    drain_runs(worker, role)
    gc.collect()


def _kilobytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _shared_memory() -> tuple[int, float]:
    """Returns the number of semaphores in `/dev/shm` and the megabytes in use there."""
    usage = os.statvfs(DEV_SHM)
    semaphores = sum(entry.name.startswith("sem.") for entry in DEV_SHM.iterdir())
    return semaphores, (usage.f_blocks - usage.f_bfree) * usage.f_frsize / 1e6


def two_workers() -> WorkerGroup:
    """Starts two workers that do no work."""
    actor = ray.remote(num_cpus=0)(BenchWorker)
    return WorkerGroup.from_actors([actor.remote() for _ in range(2)], ParallelLayout(tp=2))


def main() -> int:
    parser = argparse.ArgumentParser(prog="dagrl.bench.endurance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replays", type=int, default=100_000)
    parser.add_argument("--cycles", type=int, default=100)
    add_outputs(parser, plot=False)
    options = parser.parse_args()
    found: dict[str, Row] = {}
    with bench_cluster():
        group = two_workers()
        for name, measure, count in (("replays", replays, options.replays), ("cycles", cycles, options.cycles)):
            found[name] = measure(group, count)
            print(name, found[name], flush=True)
            write_result(options.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
