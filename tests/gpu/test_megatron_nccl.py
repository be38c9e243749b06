"""Megatron layouts over NCCL: losses and gradients as on one CPU process, checkpoints, and aborts of hanging collectives."""

import os
import signal
import time
from pathlib import Path

import pytest

from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from tests.gpu import needs_gpus
from tests.integration import megatron_reference as reference
from tests.integration.train_cases import Case, megatron, plain_torch, run_case, train
from tests.integration.train_pool import Group, WorkerError, WorkerPool

pytest.importorskip("megatron.core")
CASES = [
    megatron("qwen3_moe", dp=2, ep=2),
    megatron("qwen3_moe", tp=2, ep=2, etp=1),
    megatron("qwen3", cp=2),
    megatron("qwen3", sequence_parallel=True, tp=2),
    megatron("qwen3", sequence_parallel=True, recomputed=True, tp=2),
    megatron("qwen3", packed=True, recomputed=True, cp=2),
    megatron("qwen3", pp=2, vpp=2),
    megatron("qwen3_tied", packed=True, pp=2),
    megatron("qwen3_tied", pp=2),
    megatron("qwen3", sharded=True, dp=2),
    megatron("qwen3", overlap=True, dp=2),
    megatron("qwen3", sharded=True, overlap=True, dp=2),
    megatron("qwen3", tp=4),
    megatron("qwen3", sequence_parallel=True, packed=True, tp=2, cp=2),
    megatron("qwen3_tied", tp=2, pp=2),
    megatron("qwen3_moe", sharded=True, dp=4, ep=4),
    megatron("qwen3_moe_mixed", dp=2, pp=2, ep=2),
    megatron("qwen3_tied", sharded=True, tp=2, pp=2, dp=2),
    megatron("qwen3_many_experts", sharded=True, dp=8, ep=8),
]
STEPS = [pytest.param(case, marks=needs_gpus(ParallelLayout(**case.sizes).world_size), id=str(case)) for case in CASES]


@pytest.mark.parametrize("case", STEPS)
def test_three_steps_match_plain_torch(case: Case, pool: WorkerPool) -> None:
    reference.assert_near_float32(run_case(pool, case), plain_torch(pool.models[case.model]))


@pytest.mark.parametrize("case", STEPS)
def test_bfloat16_is_close_to_float32(case: Case, pool: WorkerPool) -> None:
    """Compares log-probabilities, gradients and the losses of three steps by relative norm."""
    found = run_case(pool, case, precision="bfloat16")
    assert not reference.beyond_bfloat16(found, plain_torch(pool.models[case.model]))


CHECKPOINTS: list[tuple[Case, list[tuple[Case, str]]]] = [
    (
        megatron("qwen3", tp=2),
        [
            (megatron("qwen3", tp=2), "background"),
            (megatron("qwen3", pp=2), "step-1"),
            (megatron("qwen3", dp=2), "background"),
        ],
    ),
    (
        megatron("qwen3", dp=2, sharded=True),
        [
            (megatron("qwen3", dp=2, sharded=True), "background"),
            (megatron("qwen3", tp=2), "step-1"),
            (megatron("qwen3"), "background"),
        ],
    ),
]


@pytest.mark.parametrize(("first", "others"), CHECKPOINTS, ids=["replicated", "sharded"])
def test_a_checkpoint_resumes_in_another_layout(
    first: Case, others: list[tuple[Case, str]], pool: WorkerPool, tmp_path: Path
) -> None:
    """Ranks agree on files over Gloo. One checkpoint is written in the background while training changes the state."""
    batch = reference.make_batch()
    with first.group(pool) as group:
        train(group, batch)
        group.call("save_checkpoint", str(tmp_path / "step-1"))
        group.call("save_checkpoint", str(tmp_path / "background"), True)
        went_on = [train(group, batch) for _ in range(2)]
        group.call("finish_checkpoint")
    for other, name in others:
        with other.group(pool) as group:
            group.call("load_checkpoint", str(tmp_path / name))
            resumed = [train(group, batch) for _ in range(2)]
        for found, expected in zip(resumed, went_on, strict=True):
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def check_abort(group: Group, batch: Batch, method: str = "logprobs", *more: str) -> None:
    """Worker 1 waits in a collective that worker 0 never joins, is aborted, and raises."""
    start = time.monotonic()
    group.start(1, "aborted_after", 1.0, method, batch, *more)
    with pytest.raises(WorkerError, match="was aborted"):
        group.finish(1, timeout_s=30)
    assert time.monotonic() - start < 15


WAITING = {
    megatron("qwen3", tp=2): ("logprobs",),
    megatron("qwen3", cp=2): ("logprobs",),
    megatron("qwen3", dp=2): ("train_step", "likelihood"),
}


@pytest.mark.parametrize("case", WAITING, ids=str)
def test_an_abort_ends_a_collective_without_peers(case: Case, pool: WorkerPool) -> None:
    """After a step every group has a communicator. A kernel waits in one of them, and all must end."""
    batch, (method, *more) = reference.make_batch(), WAITING[case]
    with case.group(pool) as group:
        train(group, batch)
        check_abort(group, batch, method, *more)
        group.call("abort")
    with case.group(pool) as group:  # nothing is left of the broken groups
        assert group.call("logprobs", batch)[0] is not None


def test_waiting_for_a_killed_peer_raises(models: dict[str, Path]) -> None:
    """The survivor hangs in an all-reduce until the runtime aborts it. Its process ends, as groups restart as a whole."""
    batch, pool = reference.make_batch(), WorkerPool(2, models)
    victim, survivor = pool.pids
    with pytest.raises(BrokenPipeError), megatron("qwen3", tp=2).group(pool) as group:
        group.call("logprobs", batch)
        os.kill(victim, signal.SIGKILL)
        assert pool.connections[0].poll(10), "the process has ended"
        check_abort(group, batch)
    os.kill(survivor, signal.SIGKILL)
