"""One suite over every executor and engine, with fake workers: results, order, limits, transports, failures; no growth."""

import dataclasses
import gc
import logging
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from dagrl.bench.worker import BenchWorker
from dagrl.errors import ConfigError, DeadlineError, PhaseError, RunError, WorkerError
from dagrl.run.local_cluster import cluster_processes
from dagrl.runtime.actors import Resources
from dagrl.runtime.executors.node import TRACE_CAPACITY, drain_runs, state_of
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Phase, Shard, join, phase
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.runtime.shapes import Batch, Bucket, Field
from dagrl.runtime.worker import WorkerContext
from dagrl.runtime.worker_group import WorkerGroup
from tests.integration.fake_workers import ENGINES, FakeWorker
from tests.integration.processes import processor_seconds
from tests.integration.schedules import actors_of, compiled, group_of
from tests.unit.runtime.doubles import Unreadable

TOKENS = {"tokens": Field("int64"), "lengths": Field("int64", "row")}


@phase(inputs=TOKENS)
def double(train: Shard, batch):
    return train.reduce("first", train.map("double", batch))


@phase(inputs=TOKENS)
def count_tokens(train: Shard, batch):
    return train.reduce("total", train[0].map("shard_tokens", batch, scale=3))


@phase
def ranks(train: Shard, value):
    return train.map("rank", value)


@phase
def chain(train: Shard, value):
    first, *rest = train.stages()
    x = first.map("add_one", value)
    for stage in rest:
        x = stage.map("add_one", x)
    return x


@phase
def both(train: Shard, generation: Shard, value):
    return join(train.map("rank", value), generation.map("rank", value))


@phase
def slow(train: Shard, seconds):
    return train.reduce("first", train.map("slow", seconds))


@phase
def slow_generation(generation: Shard, seconds):
    return generation.reduce("first", generation.map("slow", seconds))


@phase
def misbehave(train: Shard, how):
    return train.map("misbehave", how)


@phase
def large(train: Shard, size):
    return train.map("large", size)


WELL = {"rank": -1, "kind": "raise"}  # no worker is meant
OPTIONS = {"max_in_flight": 2, "result_bytes": 1 << 16, "replay_s": 30.0, "teardown_s": 5.0}


@pytest.fixture(scope="module")
def groups(cluster: None) -> Iterator[list[WorkerGroup]]:
    with group_of(FakeWorker, dp=2, pp=2) as train, group_of(FakeWorker, "generation", tp=2) as generation:
        yield [train, generation]


@pytest.fixture(scope="module", params=ENGINES)
def scheduler(request: pytest.FixtureRequest, groups: list[WorkerGroup]) -> Iterator[Scheduler]:
    with Scheduler(groups, SchedulerOptions(**ENGINES[request.param], fallback="error", **OPTIONS)) as scheduler:
        for item in (double, count_tokens):
            scheduler.add(item, buckets=[Bucket(2, 4), Bucket(4, 8)])
        values = {ranks: "warm", both: "warm", chain: 0, slow: 0.0, slow_generation: 0.0, misbehave: WELL, large: 1}
        for item, value in values.items():
            scheduler.add(item, warmup_value=value)
        before = set(ray._private.state.actors())
        scheduler.compile()
        STARTED[request.param] = len(set(ray._private.state.actors()) - before)
        scheduler.warmup()
        yield scheduler


STARTED: dict[str, int] = {}  # actors that were started to compile, by engine


def test_graphs_start_no_process_except_on_rays_engine(scheduler: Scheduler) -> None:
    engine, started = list(STARTED.items())[-1]
    assert (started > 0) == (engine == "ray"), STARTED


def test_a_cluster_has_no_process_that_runs_do_not_use(cluster: None) -> None:
    assert sorted(Path(process.args[0]).name for process in cluster_processes()) == ["gcs_server", "raylet"]


def ragged(lengths: list[int]) -> Batch:
    tokens = np.zeros((len(lengths), max(lengths)), dtype=np.int64)
    for row, length in enumerate(lengths):
        tokens[row, :length] = 100 * row + np.arange(length)
    return Batch({"tokens": tokens, "lengths": np.array(lengths)})


@pytest.mark.parametrize("lengths", [[3, 1], [1, 8, 2, 5, 7], [4] * 8, [2]])
def test_rows_come_back_in_input_order_without_padding(scheduler: Scheduler, lengths: list[int]) -> None:
    batch = ragged(lengths)
    result = scheduler.replay(double, batch).result()
    np.testing.assert_array_equal(result["doubled"], batch["tokens"] * 2)
    np.testing.assert_array_equal(result["lengths"], lengths)


def test_a_result_over_its_channel_is_an_error_that_names_the_limit(scheduler: Scheduler) -> None:
    with pytest.raises(PhaseError, match="raise SchedulerOptions"):
        scheduler.replay(large, 1 << 20).result()
    assert len(scheduler.replay(large, 10).result()) == 2


def test_an_exception_names_worker_phase_and_replay_and_the_graph_lives_on(scheduler: Scheduler) -> None:
    with pytest.raises(PhaseError, match="told to raise") as caught:
        scheduler.replay(misbehave, {"rank": 3, "kind": "raise"}).result()
    failure = caught.value.failures[0]
    assert (failure.role, failure.rank, failure.phase, failure.kind) == ("train", 3, "misbehave", "raised")
    assert failure.coordinates == "dp 1, pp 1, tp 0, cp 0"
    assert 'raise ValueError("the fake worker' in failure.traceback
    assert scheduler.groups["train"].call("was_aborted") == [False, False, False, True]
    assert scheduler.replay(misbehave, WELL).result() == ([0, 2], [1, 3])


def test_an_input_that_workers_cannot_unpickle_is_the_failure_of_each_and_the_graph_lives_on(scheduler: Scheduler) -> None:
    with pytest.raises(PhaseError, match="ValueError: cannot be made again") as caught:
        scheduler.replay(misbehave, Unreadable()).result()
    assert {failure.rank for failure in caught.value.failures} == {0, 1, 2, 3} and not caught.value.breaks
    train = scheduler.groups["train"]
    assert train.call("was_aborted") == [True] * 4, "peers would wait for them"
    train.call_function(lambda worker: setattr(worker, "aborted", False))
    assert scheduler.replay(misbehave, WELL).result() == ([0, 2], [1, 3])


@pytest.mark.parametrize("value", [{"rank": 3, "kind": "unreadable"}, [Unreadable()]], ids=["result", "in a list"])
def test_a_value_that_cannot_be_unpickled_is_an_error_that_names_it_and_breaks_the_graph(
    scheduler: Scheduler, value: object
) -> None:
    with pytest.raises(PhaseError, match="cannot be made again") as caught:
        scheduler.replay(misbehave, value).result()
    assert caught.value.breaks
    scheduler.groups["train"].call_function(lambda worker: setattr(worker, "aborted", False))
    scheduler.recover()
    assert scheduler.replay(misbehave, WELL).result() == ([0, 2], [1, 3])


def test_tensors_of_newer_dtypes_come_as_they_are(scheduler: Scheduler) -> None:
    sent = torch.arange(64, dtype=torch.uint8).view(8, 8)
    value = [sent.view(torch.float8_e4m3fn), sent.view(torch.uint16)]
    _, (_, found) = scheduler.replay(misbehave, {"rank": 3, "kind": "echo", "value": value}).result()
    assert [one.dtype for one in found] == [torch.float8_e4m3fn, torch.uint16]
    assert all(torch.equal(one.view(torch.uint8), sent) for one in found)


def test_replays_of_one_group_keep_their_order_and_those_of_two_overlap(scheduler: Scheduler) -> None:
    first = scheduler.replay(slow, 0.3)
    other = scheduler.replay(slow_generation, 0.3)
    then = scheduler.replay(ranks, "last")
    assert then.result() == ([0, 2], [1, 3])
    assert first.result() == ("done", "done")
    assert other.result() == ("done",)
    for history in scheduler.groups["train"].call("history"):
        assert [call for call in history if call.startswith(("slow", "rank:last"))][-2:][1] == "rank:last"
    assert first.timing is not None and first.timing.busy_s >= 0.3


def test_a_thread_that_waits_does_not_hold_up_replays_of_other_phases(scheduler: Scheduler, tmp_path: Path) -> None:
    released = tmp_path / "released"
    replay = scheduler.replay(slow, str(released))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(replay.result)
        time.sleep(0.1)
        try:
            for _ in range(3):
                assert scheduler.replay(slow_generation, 0.05).result() == ("done",)
            assert not waiting.done()
        finally:
            released.touch()
        assert waiting.result() == ("done", "done")


def test_more_replays_than_fit_in_flight_wait_for_the_oldest(scheduler: Scheduler) -> None:
    replays = [scheduler.replay(chain, number) for number in range(10)]
    assert [replay.result()[0] for replay in replays] == [number + 2 for number in range(10)]


def test_many_phases_live_on_the_same_workers(scheduler: Scheduler) -> None:
    """Nine graphs on each train worker, started in another order each time and read in the opposite one."""
    graphs = scheduler.graphs().values()
    assert sum(any(node.worker.role == "train" for node in graph.nodes) for graph in graphs) >= 8
    batch = ragged([3, 3])
    expected = [
        (ranks, "x", ([0, 2], [1, 3])),
        (chain, 40, (42, 42)),
        (both, "x", ([0, 2, 1, 3, 0, 1],)),
        (count_tokens, batch, (9, 9)),
        (slow, 0.0, ("done", "done")),
        (misbehave, WELL, ([0, 2], [1, 3])),
        (large, 3, None),
    ]
    for turn in range(8):
        started = [(scheduler.replay(item, value), result) for item, value, result in expected[turn:] + expected[:turn]]
        for replay, result in reversed(started):
            assert result is None or replay.result() == result
            replay.result()


def test_runs_that_miss_a_deadline_come_with_the_next_call(scheduler: Scheduler) -> None:
    train = scheduler.groups["train"]
    train.drain_runs(60.0)
    scheduler.replay(ranks, "x").result()
    asked = [train.drain_runs(timeout_s) for timeout_s in (0.0, 60.0)]
    for rank in range(4):
        assert [run.phase for runs in asked for run in runs[rank]] == ["ranks"]


def test_graphs_that_wait_take_no_processor_time(scheduler: Scheduler) -> None:
    """In the quietest of some seconds: Ray's own threads have work now and then, a loop that polls has in each."""
    if scheduler.options.engine == "ray":
        pytest.skip("Ray's channels poll")
    pids = [place.pid for group in scheduler.groups.values() for place in group.locations]
    used = []
    while len(used) < 5 and min(used, default=1.0) >= 0.2:
        before = [processor_seconds(pid) for pid in pids]
        time.sleep(1.0)
        used.append(max(processor_seconds(pid) - start for pid, start in zip(pids, before, strict=True)))
    assert min(used) < 0.2, "a loop of a compiled graph polls"


class Unbuilt(FakeWorker):
    """Its constructor raises what `config` is, which Ray takes for the death of the actor."""

    def __init__(self, context: WorkerContext, config: BaseException) -> None:
        raise config


def test_an_error_of_a_constructor_is_reported(cluster: None) -> None:
    layout = ParallelLayout()
    with pytest.raises(
        WorkerError, match=r"^train worker 0 \(.*\) raised in 'start': ValueError: heads\n  and more\n"
    ) as told:
        WorkerGroup.create("train", Unbuilt, layout, ValueError("heads\n  and more"))
    assert "in __init__\n    raise config\n" in str(told.value) and "\x1b" not in str(told.value)
    with pytest.raises(ConfigError, match=r"^keys: one\nand: two$"):
        WorkerGroup.create("train", Unbuilt, layout, ConfigError("keys: one\nand: two"))


def test_a_worker_that_ray_cannot_place_is_an_error_with_what_is_missing(cluster: None) -> None:
    with pytest.raises(DeadlineError, match=r"train worker 0 .*start_s = 1 s.*Ray has 0 of the cluster's 0 GPUs free"):
        WorkerGroup.create("train", FakeWorker, ParallelLayout(), None, resources=Resources(num_gpus=1), start_timeout_s=1.0)


@phase
def over_nccl(train: Shard, value):
    first, second = train.stages()
    return second.map("add_one", first.map("add_one", value).via("nccl"))


@phase
def to_itself(train: Shard, value):
    first = train[0].map("add_one", value).via("nccl")
    return train[0].map("add_one", first)


@phase
def one(train: Shard, value):
    return train.map("add_one", value)


@phase
def another(train: Shard, value):
    return train.map("add_one", value)


@pytest.fixture(scope="module")
def stages(cluster: None) -> Iterator[WorkerGroup]:
    with group_of(FakeWorker, pp=2) as group:
        group.role = dataclasses.replace(group.role, transports=frozenset({"shm", "nccl"}))
        yield group


def test_an_edge_over_nccl_needs_gpus(stages: WorkerGroup) -> None:
    with pytest.raises(RunError, match=r"'over_nccl' could not be compiled: .*accelerator"):
        with compiled(stages, {over_nccl: 0}):
            pass


def test_without_gpus_the_phase_runs_eagerly(stages: WorkerGroup, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dagrl"), compiled(stages, {over_nccl: 0}, fallback="eager") as scheduler:
        assert "runs eagerly" in caplog.text
        assert scheduler.replay(over_nccl, 40).result() == (42,)


def test_a_worker_passes_results_to_itself_without_a_transport(stages: WorkerGroup) -> None:
    with compiled(stages, {to_itself: 0}) as scheduler:
        assert scheduler.replay(to_itself, 40).result() == (42,)


def test_an_actor_without_a_second_thread_for_rays_engine_is_an_error_that_says_how_to_make_it(cluster: None) -> None:
    with (
        actors_of(FakeWorker, [(None, None)]) as actors,
        compiled(WorkerGroup.from_actors(actors, ParallelLayout()), {}, warm=False, engine="ray") as scheduler,
    ):
        scheduler.add(one, warmup_value=0)
        scheduler.options = dataclasses.replace(scheduler.options, compile_s=3.0)  # of what cannot be compiled alone
        scheduler.add(another, warmup_value=0)
        with pytest.raises(RunError, match=r"'another' could not be compiled: .* concurrency_groups"):
            scheduler.compile()
        assert scheduler.replay(one, 40).result() == (41,)


WARMUP, REPLAYS = 300, 2000
OBJECTS, BYTES = REPLAYS // 10, 16 * REPLAYS
"""Limits of growth: one object per ten replays, and 16 bytes per replay, less than the smallest object."""


@phase
def every_worker(train: Shard, value):
    """Sends the input to every worker and every result to the driver."""
    return train.map("step", value)


@phase(inputs=TOKENS)
def rows(train: Shard, batch):
    return train[1].map("echo", train[0].map("echo", batch))


BATCH = Batch({"tokens": np.ones((3, 5), np.int64), "lengths": np.array([5, 2, 4], np.int64)}, {})


@pytest.fixture(scope="module")
def benched(cluster: None) -> Iterator[WorkerGroup]:
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
def test_nothing_grows_with_the_number_of_replays(executor: str, which: Phase, value: object, benched: WorkerGroup) -> None:
    options = SchedulerOptions(executor=executor, fallback="error")  # type: ignore[arg-type]
    with Scheduler([benched], options) as scheduler:
        scheduler.add(which, buckets=[Bucket(4, 8)] if which is rows else (), warmup_value=b"x")
        scheduler.compile()
        scheduler.warmup()
        try:
            before = _after(WARMUP, lambda: scheduler.replay(which, value).result(), benched)
            after = _after(REPLAYS, lambda: scheduler.replay(which, value).result(), benched)
            runs = benched.call_function(remembered)
        finally:
            tracemalloc.stop()
    for place, (then, now) in enumerate(zip(before, after, strict=True)):
        who = f"worker {place - 1}" if place else "the driver"
        assert now[0] - then[0] < OBJECTS, f"{who}: {now[0] - then[0]} more objects after {REPLAYS} replays"
        assert now[1] - then[1] < BYTES, f"{who}: {now[1] - then[1]} more bytes after {REPLAYS} replays"
    assert all(length == 0 and most == TRACE_CAPACITY for length, most in runs)


def _after(replays: int, replay: Callable[[], object], benched: WorkerGroup) -> list[tuple[int, int]]:
    """Returns the counts of the driver and of each worker after some replays."""
    if not tracemalloc.is_tracing():
        count()
        benched.call_function(count)
    for _ in range(replays):
        replay()
    return [count(), *benched.call_function(count)]


def test_ray_keeps_no_reports_of_calls(benched: WorkerGroup) -> None:
    """GCS would keep the last 100,000."""
    from ray._private.state import state

    for _ in range(5):
        benched.call("pid")
    time.sleep(1.5)  # Ray reports once a second
    assert state._connect_and_get_accessor().get_task_events() == []
