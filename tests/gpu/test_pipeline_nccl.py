"""Pipeline stages on two GPUs, their edges over NCCL: equal to one process on the CPU, also after a failure."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ray.dag import DAGContext

from dagrl.errors import PhaseError
from dagrl.graphs.pipeline import pipeline_phase
from dagrl.runtime.actors import Resources
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.runtime.shapes import Bucket
from dagrl.runtime.worker_group import WorkerGroup
from tests.integration.fake_workers import ENGINES
from tests.integration.pipeline_stage import MODEL, RecordedStage, check_order, check_steps, ragged_batch

pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")
STAGES, MICROBATCHES, LENGTH = 2, 4, 64
RESULT_BYTES = 1 << 15  # less than one microbatch's activations: 2 rows x 64 tokens x 64 features x 8 bytes = 64 KiB
CPU = dataclasses.replace(MODEL, width=64)
STEP = pipeline_phase(MICROBATCHES, "nccl")
SCALARS = {"global_valid_tokens": 1.0, "fail_stage": -1, "fail_microbatch": -1}


class GpuStage(RecordedStage):
    """A stage on the GPU that Ray gave it; what it is handed must lie there too."""

    @staticmethod
    def environment(config: object) -> dict[str, str]:
        return {"NCCL_NVLS_ENABLE": "0"}  # multicast, which point-to-point transfers do not use

    def forward(self, activations: torch.Tensor | None, microbatch: int) -> torch.Tensor | None:
        assert activations is None or activations.is_cuda
        return super().forward(activations, microbatch)

    def backward(self, gradients: torch.Tensor | None, microbatch: int) -> torch.Tensor | None:
        assert gradients is None or gradients.is_cuda
        return super().backward(gradients, microbatch)


@pytest.fixture(scope="module")
def group(cluster: None) -> Iterator[WorkerGroup]:
    config = dataclasses.replace(CPU, device="cuda")
    layout = ParallelLayout(dp=1, pp=STAGES)
    group = WorkerGroup.create("train", GpuStage, layout, config, resources=Resources(num_gpus=1))
    yield group
    group.shutdown(5.0)


def warmed_up(group: WorkerGroup, **options: Any) -> Scheduler:
    scheduler = Scheduler([group], SchedulerOptions(fallback="error", result_bytes=RESULT_BYTES, replay_s=60.0, **options))
    scheduler.add(STEP, buckets=[Bucket(8, LENGTH)], scalars=SCALARS)
    scheduler.compile()
    scheduler.warmup()
    return scheduler


@pytest.fixture(scope="module", params=[*((engine, False) for engine in ENGINES), ("dagrl", True), ("ray", True)])
def scheduler(request: pytest.FixtureRequest, group: WorkerGroup) -> Iterator[Scheduler]:
    engine, overlaps = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DAGContext.get_current(), "overlap_gpu_communication", overlaps)
        with warmed_up(group, **ENGINES[engine]) as scheduler:
            yield scheduler


def test_three_steps_equal_one_process_on_the_cpu(scheduler: Scheduler, group: WorkerGroup) -> None:
    check_steps(scheduler, STEP, group, [ragged_batch(7, LENGTH, seed) for seed in range(3)], CPU)


def test_the_order_is_1f1b(scheduler: Scheduler, group: WorkerGroup) -> None:
    check_order(scheduler, STEP, group, ragged_batch(8, LENGTH, 0), MICROBATCHES)


@pytest.mark.parametrize("stage", range(STAGES))
def test_a_stage_that_fails_is_named_and_the_graph_lives_on(scheduler: Scheduler, group: WorkerGroup, stage: int) -> None:
    with pytest.raises(PhaseError, match="told to raise") as caught:
        scheduler.replay(STEP, ragged_batch(8, LENGTH, 0, fail_stage=stage, fail_microbatch=2)).result()
    assert caught.value.failures[0].node == f"train[{stage}].forward"
    check_steps(scheduler, STEP, group, [ragged_batch(8, LENGTH, 4)], CPU)


def test_a_pipeline_can_be_torn_down_and_compiled_again(
    scheduler: Scheduler, group: WorkerGroup, request: pytest.FixtureRequest
) -> None:
    """The last test of each scheduler."""
    scheduler.close()
    for seed in (5, 6):
        with warmed_up(group, **ENGINES[request.node.callspec.params["scheduler"][0]]) as again:
            check_steps(again, STEP, group, [ragged_batch(8, LENGTH, seed)], CPU)
