"""The pipeline phase on real torch stages, in both executors: equal to one process, in 1F1B order, whole after a failure."""

from collections.abc import Iterator

import pytest

from dagrl.errors import PhaseError
from dagrl.graphs.pipeline import pipeline_phase
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.runtime.shapes import Bucket
from dagrl.runtime.worker_group import WorkerGroup
from tests.integration.pipeline_stage import MODEL, RecordedStage, check_order, check_steps, ragged_batch, train_alone

MICROBATCHES = 4
STEP = pipeline_phase(MICROBATCHES)
SCALARS = {"global_valid_tokens": 1.0, "fail_stage": -1, "fail_microbatch": -1}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["2 stages", "4 stages"])
def group(request: pytest.FixtureRequest, cluster: None) -> Iterator[WorkerGroup]:
    group = WorkerGroup.create("train", RecordedStage, ParallelLayout(dp=1, pp=request.param), MODEL)
    yield group
    group.shutdown(5.0)


@pytest.fixture(scope="module", params=["compiled", "eager"])
def scheduler(request: pytest.FixtureRequest, group: WorkerGroup) -> Iterator[Scheduler]:
    options = SchedulerOptions(executor=request.param, fallback="error", result_bytes=1 << 16, replay_s=60.0, teardown_s=5.0)
    with Scheduler([group], options) as scheduler:
        scheduler.add(STEP, buckets=[Bucket(8, 6)], scalars=SCALARS)
        scheduler.compile()
        scheduler.warmup()
        yield scheduler


def test_three_steps_equal_one_process(scheduler: Scheduler, group: WorkerGroup) -> None:
    check_steps(scheduler, STEP, group, [ragged_batch(7, 6, seed) for seed in range(3)])  # the eighth row is padding


def test_workers_run_in_the_order_of_their_nodes_and_hold_few_activations(scheduler: Scheduler, group: WorkerGroup) -> None:
    check_order(scheduler, STEP, group, ragged_batch(8, 6, 0), MICROBATCHES)


def test_a_stage_that_fails_is_named_no_stage_steps_and_the_graph_lives_on(scheduler: Scheduler, group: WorkerGroup) -> None:
    group.call("restart")
    middle = group.layout.pp // 2
    failing = ragged_batch(8, 6, 0, fail_stage=middle, fail_microbatch=2)
    with pytest.raises(PhaseError, match="told to raise") as caught:
        scheduler.replay(STEP, failing).result()
    failure = caught.value.failures[0]
    assert (failure.rank, failure.coordinates) == (middle, f"dp 0, pp {middle}, tp 0, cp 0")
    assert failure.node == f"train[{middle}].forward"
    assert all(("optimizer_step", 0) not in order for order, *_ in group.call("recorded"))
    whole = ragged_batch(8, 6, 1)
    (metrics,) = scheduler.replay(STEP, whole).result()
    assert metrics.sums["loss"] == pytest.approx(train_alone([whole])[0][0], rel=1e-6)
