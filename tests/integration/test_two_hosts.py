"""Phases over two raylets, which Ray takes for two hosts: equal results under both executors, and what fails there is named.

A process is in one cluster at a time, and other tests share one of a single raylet: `main` runs in a process of its own.
"""

import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from dagrl.errors import PhaseError
from dagrl.runtime.executors import loop
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Shard, join, phase
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.runtime.shapes import Batch, Bucket, Field
from dagrl.runtime.worker_group import WorkerGroup
from tests.integration.main_job import ROOT
from tests.integration.schedules import compiled


@pytest.mark.slow
def test_phases_over_two_hosts() -> None:
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["lost True () True True", "died [(5, 'died')]", "164 results are equal"]


HOSTS, PER_HOST = 2, 3
LARGE = 100_000
LARGE_RESULT = 16 << 20  # more than the buffers of a socket hold
NOTICED_S = 30.0  # far less than a replay's deadline


class Worker:
    def __init__(self, number: int) -> None:
        self.number = number

    def add(self, value):
        return value + self.number

    def both(self, value, other):
        return value + 2 * other

    def total(self, parts):
        return sum(parts)

    def scale(self, batch):
        return batch.with_fields(x=batch["x"] * batch.scalars["by"])

    def large(self, value):
        return np.full(LARGE_RESULT, 10 * value + self.number, np.uint8)

    def fail(self, number):
        if number == self.number:
            raise ValueError("told to fail")
        return number


@phase
def every_worker(train: Shard, value):
    return train.map("add", value)


@phase
def exchange(train: Shard, value):
    """One worker's result is read on both hosts, and the total of what they make of it goes round once more."""
    first = train[4].map("add", value)
    total = train.reduce("total", train.map("both", value, first))
    return join(train.map("both", total, first), total)


@phase
def chain(train: Shard, value):
    for place in (0, 3, 1, 4, 2, 5):
        value = train[place].map("add", value)
    return value


@phase
def swap(train: Shard, value):
    """Two workers on two hosts write to each other before they read, large values as well as small ones."""
    first, second = train[0], train[3]
    for _ in range(2):
        one, other = first.map("add", value), second.map("add", value)
        value = first.map("both", first.map("both", one, other), second.map("both", other, one))
    return value


@phase
def large(train: Shard, value):
    return train.map("large", value)


@phase
def fail(train: Shard, number):
    return train.map("fail", number)


@phase(inputs={"x": Field("float32"), "lengths": Field("int64", "row")})
def scaled(train: Shard, batch):
    """Shards of both hosts: each worker has rows of its own."""
    return train.map("scale", batch)


PHASES = (every_worker, exchange, chain)


def shares_come_back(group: WorkerGroup, executor: str) -> None:
    """Small batches and large ones, whose rows are dealt out over the shards of both hosts."""
    with Scheduler([group], SchedulerOptions(executor=executor, fallback="error")) as scheduler:  # type: ignore[arg-type]
        scheduler.add(scaled, buckets=[Bucket(3, 5000)], scalars={"by": 0})
        scheduler.compile()
        scheduler.warmup()
        for rows, width in ((1, 3), (7, 20), (18, 5000)):
            x = np.arange(float(rows * width), dtype=np.float32).reshape(rows, width)
            batch = Batch({"x": x, "lengths": np.full(rows, width)}, {"by": 2})
            found = scheduler.replay(scaled, batch).result()
            np.testing.assert_array_equal(found["x"], 2 * x)


def replayed(group: WorkerGroup, executor: str, values: list[object]) -> list[object]:
    found: list[object] = []
    options = SchedulerOptions(executor=executor, fallback="error", result_bytes=8 << 20)  # type: ignore[arg-type]
    with Scheduler([group], options) as scheduler:
        for item in PHASES:
            scheduler.add(item, warmup_value=0, input_bytes=2 << 20)
        scheduler.add(fail, warmup_value=-1)
        scheduler.compile()
        scheduler.warmup()
        for value in values:
            started = [scheduler.replay(item, value) for item in PHASES]
            found += [replay.result() for replay in started]
        for number in (1, 4):  # on either host
            try:
                scheduler.replay(fail, number).result()
            except PhaseError as error:
                found.append([(failure.rank, failure.message) for failure in error.failures])
        if executor == "compiled":
            ray.kill(group.actors[5])
            print("died", after_death(scheduler))
    return found


def swap_large(group: WorkerGroup) -> None:
    """Inputs, results and what the workers write to each other, all larger than a socket's buffers; two in flight."""
    options = SchedulerOptions(fallback="error", result_bytes=2 * LARGE_RESULT, replay_s=60.0)
    with Scheduler([group], options) as scheduler:
        scheduler.add(swap, warmup_value=0, input_bytes=2 * LARGE_RESULT)
        scheduler.compile()
        for _ in range(3):
            started = [scheduler.replay(swap, np.full(LARGE_RESULT // 8, float(number))) for number in range(2)]
            for number, replay in enumerate(started):
                (found,) = replay.result()
                np.testing.assert_array_equal(found, np.full(LARGE_RESULT // 8, swapped(swapped(number))))
        lose_a_link(scheduler, group)


def swapped(value: float) -> float:
    """Returns what `swap` makes of a value in one round: workers 0 and 3 add their numbers."""
    one, other = value, value + 3
    return (one + 2 * other) + 2 * (other + 2 * one)


def lose_a_link(scheduler: Scheduler, group: WorkerGroup) -> None:
    """Ends a connection between two living workers: the driver hears of it from either, and compiles again."""
    ray.get(group.actors[3].__ray_call__.remote(cut_links))
    started = time.monotonic()
    try:
        scheduler.replay(swap, 1.0).result()
    except PhaseError as error:
        soon = time.monotonic() - started < NOTICED_S
        print("lost", soon, error.failures, "lost the link" in str(error), bool(error.breaks))
    scheduler.recover()
    assert scheduler.replay(swap, 1.0).result() == (swapped(swapped(1.0)),)


def cut_links(worker: object) -> None:
    """End the connections that this worker writes to, as a network does."""
    for writer in [writer for one in loop._loops.values() for writer in one.writers.values()]:
        for link in writer._links.values():
            if link._socket is not None:
                link._socket.shutdown(socket.SHUT_RDWR)


def large_results(group: WorkerGroup) -> None:
    """Checks that each result fits, and all of a host in one message too."""
    with compiled(group, {large: 0}, warm=False, result_bytes=LARGE_RESULT + (1 << 16)) as scheduler:
        (found,) = scheduler.replay(large, 2).result()
        assert [(one.size, one.min(), one.max()) for one in found] == [(LARGE_RESULT, 20 + n, 20 + n) for n in range(6)]


def after_death(scheduler: Scheduler) -> list[tuple[int, str]]:
    """Returns who is named once Ray has killed a worker."""
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        try:
            scheduler.replay(every_worker, 0).result()
        except PhaseError as error:
            return [(failure.rank, failure.kind) for failure in error.failures]
    raise AssertionError("no replay failed after a worker was killed")


def main() -> None:
    cluster = Cluster()
    for host in range(HOSTS):
        cluster.add_node(num_cpus=2, resources={f"host{host}": 1}, object_store_memory=200 << 20)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    actor = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"_ray_system": 5})(Worker)
    places = [f"host{number // PER_HOST}" for number in range(HOSTS * PER_HOST)]
    handles = [actor.options(resources={place: 0.001}).remote(number) for number, place in enumerate(places)]
    for executor in ("eager", "compiled"):
        shares_come_back(WorkerGroup.from_actors(handles, ParallelLayout(dp=len(handles))), executor)
    group = WorkerGroup.from_actors(handles, ParallelLayout(tp=len(handles)))
    swap_large(group)
    large_results(group)
    values = [1, 2.5, np.arange(5), np.arange(float(LARGE)), *range(50)]
    expected, found = replayed(group, "eager", values), replayed(group, "compiled", values)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_equal(one, other)
    print(f"{len(found)} results are equal")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
