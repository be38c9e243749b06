"""Nothing grows with the number of replays, on the driver or on workers: objects and bytes that Python tracks."""

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from dagrl.bench.worker import BenchWorker
from dagrl.runtime.executors.node import TRACE_CAPACITY, drain_runs, state_of
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Input, Phase, Shard, Value, phase
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.runtime.shapes import Batch, Bucket, Field
from dagrl.runtime.worker_group import WorkerGroup
from tests.integration.schedules import actors_of

WARMUP, REPLAYS = 300, 2000
OBJECTS, BYTES = REPLAYS // 10, 16 * REPLAYS
"""Limits of growth: one object per ten replays, and 16 bytes per replay, less than the smallest object."""


@phase
def every_worker(train: Shard, value: Input) -> Value:
    """Sends the input to every worker and every result to the driver."""
    return train.map("step", value)


@phase(inputs={"tokens": Field("int64"), "lengths": Field("int64", "row")})
def rows(train: Shard, batch: Input) -> Value:
    return train[1].map("echo", train[0].map("echo", batch))


BATCH = Batch({"tokens": np.ones((3, 5), np.int64), "lengths": np.array([5, 2, 4], np.int64)}, {})


@pytest.fixture(scope="module")
def group(cluster: None) -> Iterator[WorkerGroup]:
    with actors_of(BenchWorker) as actors:
        yield WorkerGroup.from_actors(actors, ParallelLayout(tp=2))


def count(worker: BenchWorker | None = None) -> tuple[int, int]:
    """Returns the objects the garbage collector tracks and the bytes Python has allocated since the first call."""
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    if worker is not None:
        drain_runs(worker, "train")  # type: ignore[arg-type]  # the trace; a driver drains it in every step
    gc.collect()
    return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]


def remembered(worker: BenchWorker) -> tuple[int, int | None]:
    runs = state_of(worker).members["train"].runs  # type: ignore[arg-type]
    return len(runs), runs.maxlen


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["compiled", "eager"])
@pytest.mark.parametrize(("which", "value"), [(every_worker, b"x"), (rows, BATCH)], ids=["bytes", "batches"])
def test_nothing_grows_with_the_number_of_replays(executor: str, which: Phase, value: object, group: WorkerGroup) -> None:
    options = SchedulerOptions(executor=executor, fallback="error")  # type: ignore[arg-type]
    with Scheduler([group], options) as scheduler:
        scheduler.add(which, buckets=[Bucket(4, 8)] if which is rows else (), warmup_value=b"x")
        scheduler.compile()
        scheduler.warmup()
        try:
            before = _after(WARMUP, lambda: scheduler.replay(which, value).result(), group)
            after = _after(REPLAYS, lambda: scheduler.replay(which, value).result(), group)
            runs = group.call_function(remembered)
        finally:
            tracemalloc.stop()
    for place, (then, now) in enumerate(zip(before, after, strict=True)):
        who = f"worker {place - 1}" if place else "the driver"
        assert now[0] - then[0] < OBJECTS, f"{who}: {now[0] - then[0]} more objects after {REPLAYS} replays"
        assert now[1] - then[1] < BYTES, f"{who}: {now[1] - then[1]} more bytes after {REPLAYS} replays"
    assert all(length == 0 and most == TRACE_CAPACITY for length, most in runs)


def _after(replays: int, replay: Callable[[], object], group: WorkerGroup) -> list[tuple[int, int]]:
    """Returns the counts of the driver and of each worker after some replays."""
    if not tracemalloc.is_tracing():
        count()
        group.call_function(count)
    for _ in range(replays):
        replay()
    return [count(), *group.call_function(count)]


def test_ray_keeps_no_reports_of_calls(group: WorkerGroup) -> None:
    """GCS would keep the last 100,000."""
    from ray._private.state import state

    for _ in range(5):
        group.call("pid")
    time.sleep(1.5)  # Ray reports once a second
    assert state._connect_and_get_accessor().get_task_events() == []
