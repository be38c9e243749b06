"""Whole runs of Megatron and vLLM that lose workers to SIGKILL: they go on with what is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.dying import PLACES
from tests.faults.killing import DEATH_AT, measure


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
