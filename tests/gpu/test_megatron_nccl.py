"""Megatron layouts over NCCL: losses and gradients as on one CPU process, checkpoints, and aborts of hanging collectives."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from tests.gpu import needs_gpus
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import Group, MegatronPool, WorkerError
from tests.integration.test_megatron_checkpoint import SHARDED, Setting
from tests.integration.test_megatron_layouts import Case, case, plain_torch, run_case, train

pytest.importorskip("megatron.core")
CASES = [
    case("qwen3_moe", "dp2ep2", dp=2, ep=2),
    case("qwen3_moe", "tp2ep2etp1", tp=2, ep=2, etp=1),
    case("qwen3", "cp2", cp=2),
    case("qwen3", "tp2-sp", sequence_parallel=True, tp=2),
    case("qwen3", "tp2-sp-recomputed", sequence_parallel=True, recomputed=True, tp=2),
    case("qwen3", "cp2-packed", packed=True, recomputed=True, cp=2),
    case("qwen3", "pp2vpp2", pp=2, vpp=2),
    case("qwen3_tied", "pp2-packed", packed=True, pp=2),
    case("qwen3_tied", "pp2", pp=2),
    case("qwen3", "dp2-sharded", sharded=True, dp=2),
    case("qwen3", "dp2-overlapped", overlap=True, dp=2),
    case("qwen3", "dp2-sharded-overlapped", sharded=True, overlap=True, dp=2),
    case("qwen3", "tp4", tp=4),
    case("qwen3", "tp2cp2-sp-packed", sequence_parallel=True, packed=True, tp=2, cp=2),
    case("qwen3_tied", "tp2pp2", tp=2, pp=2),
    case("qwen3_moe", "dp4ep4-sharded", sharded=True, dp=4, ep=4),
    case("qwen3_moe_mixed", "dp2pp2ep2", dp=2, pp=2, ep=2),
    case("qwen3_tied", "tp2pp2dp2-sharded", sharded=True, tp=2, pp=2, dp=2),
    case("qwen3_many_experts", "dp8ep8-sharded", sharded=True, dp=8, ep=8),
]
STEPS = [pytest.param(item, marks=needs_gpus(item.layout.world_size), id=item.name) for item in CASES]


@pytest.mark.parametrize("item", STEPS)
def test_three_steps_match_plain_torch(item: Case, pool: MegatronPool, models: dict[str, Path]) -> None:
    reference.assert_near_float32(run_case(pool, item, models[item.model]), plain_torch(models[item.model]))


@pytest.mark.parametrize("item", STEPS)
def test_bfloat16_is_close_to_float32(item: Case, pool: MegatronPool, models: dict[str, Path]) -> None:
    """Compares log-probabilities, gradients and the losses of three steps by relative norm."""
    found = run_case(pool, item, models[item.model], precision="bfloat16")
    assert not reference.beyond_bfloat16(found, plain_torch(models[item.model]))


CHECKPOINTS: list[tuple[Setting, list[tuple[ParallelLayout, dict[str, Any], str]]]] = [
    (
        (ParallelLayout(tp=2), {}),
        [
            (ParallelLayout(tp=2), {}, "background"),
            (ParallelLayout(pp=2), {}, "step-1"),
            (ParallelLayout(dp=2), {}, "background"),
        ],
    ),
    (
        (ParallelLayout(dp=2), SHARDED),
        [
            (ParallelLayout(dp=2), SHARDED, "background"),
            (ParallelLayout(tp=2), {}, "step-1"),
            (ParallelLayout(), {}, "background"),
        ],
    ),
]


@pytest.mark.parametrize(("first", "others"), CHECKPOINTS, ids=["replicated", "sharded"])
def test_a_checkpoint_resumes_in_another_layout(
    first: Setting,
    others: list[tuple[ParallelLayout, dict[str, Any], str]],
    pool: MegatronPool,
    models: dict[str, Path],
    tmp_path: Path,
) -> None:
    """Ranks agree on files over Gloo. One checkpoint is written in the background while training changes the state."""
    batch, (layout, policy) = reference.make_batch(), first
    with pool.group(layout, reference.make_config(models["qwen3"], **policy)) as group:
        train(group, batch)
        group.call("save_checkpoint", str(tmp_path / "step-1"))
        group.call("save_checkpoint", str(tmp_path / "background"), True)
        went_on = [train(group, batch) for _ in range(2)]
        group.call("finish_checkpoint")
    for other, settings, name in others:
        with pool.group(other, reference.make_config(models["qwen3"], **settings)) as group:
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


@pytest.mark.parametrize(
    ("layout", "waits_in"),
    [
        (ParallelLayout(tp=2), ("logprobs",)),
        (ParallelLayout(cp=2), ("logprobs",)),
        (ParallelLayout(dp=2), ("train_step", "likelihood")),
    ],
    ids=["tp2", "cp2", "dp2"],
)
def test_an_abort_ends_a_collective_without_peers(
    pool: MegatronPool, models: dict[str, Path], layout: ParallelLayout, waits_in: tuple[str, ...]
) -> None:
    """After a step every group has a communicator. A kernel waits in one of them, and all must end."""
    batch, config = reference.make_batch(), reference.make_config(models["qwen3"])
    with pool.group(layout, config) as group:
        train(group, batch)
        check_abort(group, batch, *waits_in)
        group.call("abort")
    with pool.group(layout, config) as group:  # nothing is left of the broken groups
        assert group.call("logprobs", batch)[0] is not None


def test_waiting_for_a_killed_peer_raises(models: dict[str, Path]) -> None:
    """The survivor hangs in an all-reduce until the runtime aborts it. Its process ends, as groups restart as a whole."""
    batch, config = reference.make_batch(), reference.make_config(models["qwen3"])
    pool = MegatronPool(2)
    victim, survivor = pool.pids
    with pytest.raises(BrokenPipeError), pool.group(ParallelLayout(tp=2), config) as group:
        group.call("logprobs", batch)
        os.kill(victim, signal.SIGKILL)
        assert pool.connections[0].poll(10), "the process has ended"
        check_abort(group, batch)
    os.kill(survivor, signal.SIGKILL)
