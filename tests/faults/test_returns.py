"""Whole runs that lose something else than an engine: they train again soon, and what is slow does not count as lost."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.killing import DEATH_AT, PLACES, measure
from tests.integration.main_job import GRPO, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BACK_S = 60.0  # half of it on two quiet cores

SMALL = (
    "sft.max_num_steps=0",
    *("grpo.max_num_steps=4000", "grpo.max_val_samples=16", "grpo.val_period=50"),
    *("checkpointing.save_period=5", "checkpointing.keep_last_k=2"),
    "logger.tensorboard_enabled=false",
)
IN_FLIGHT = (
    "grpo.async_grpo={enabled: true, in_flight_weight_updates: true, max_trajectory_age_steps: 2}",
    "loss_fn.use_importance_sampling_correction=true",
)
RUNTIME_ENV_AGENT, TRAIN_WORKER = r"runtime_env.agent", r"ray::Megatron"


@pytest.mark.parametrize(
    ("pattern", "number", "more"),
    [(RUNTIME_ENV_AGENT, signal.SIGKILL, IN_FLIGHT), (TRAIN_WORKER, signal.SIGSTOP, ())],
    ids=["SIGKILL of the runtime-env agent", "SIGSTOP of a train worker"],
)
def test_the_next_step_ends_soon_after(tmp_path: Path, pattern: str, number: signal.Signals, more: tuple[str, ...]) -> None:
    """Ray's node dies with its agent, and the engine on it may be the first that is missed: no new one is waited for."""
    pytest.importorskip("vllm")
    with running(GRPO, tmp_path, "run", *SMALL, *more) as run:
        run.wait_for_step(12)
        pid = run.pids(pattern)[0]
        os.kill(pid, number)
        struck = time.time()
        run.wait_for_text("restarting from the newest checkpoint")
        noticed = time.time()
        run.wait_until(lambda: any(line["time"] > noticed and "loss" in line for line in run.metrics), "a step after it")
        assert time.time() - struck < BACK_S
        assert "training goes on" not in run.drawn


def test_checkpoints_validations_and_an_export_are_no_hang(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    short = ("grpo.max_num_steps=6", "grpo.val_period=1", "checkpointing.save_period=1", "on_failure=stop")
    learns = "reward.function=dagrl.bench.workloads:alternating"
    with running(GRPO, tmp_path, "run", *SMALL, *short, learns, "timeouts.hang_floor_s=1") as run:
        assert run.finish() == 0, run.shown


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_disturbed_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """A train worker in a step, a generation worker in a quantum, and one in a refit: no step is repeated.

    Engines run bursts, as on GPUs.
    """
    pytest.importorskip("vllm")
    replicas, bursts = "policy.megatron_cfg.data_parallel_size=2", "policy.generation.vllm_cfg.num_scheduler_steps=16"
    faults = measure(tmp_path, [replicas, bursts])
    assert [fault.place for fault in faults] == list(PLACES)
    assert faults[0].resumed_from_step == DEATH_AT["all_reduce"]
    for fault in faults:
        assert fault.steps_compared >= 2
        assert fault.loss_difference == fault.grad_norm_difference == 0.0
