"""Workers killed in an all-reduce, a quantum and a refit: the run goes on, and losses are the same."""

from __future__ import annotations

import pytest
import torch

from tests.faults.dying import PLACES
from tests.faults.killing import DEATH_AT, Fault, measure

pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> list[Fault]:
    """Returns the faults of a GRPO run; of two runs on two GPUs, as an all-reduce takes both."""
    replicas, directory = "policy.megatron_cfg.data_parallel_size=2", tmp_path_factory.mktemp("faults")
    if torch.cuda.device_count() >= 3:
        return measure(directory, [replicas])
    sft = measure(directory / "sft", [replicas, "algorithm=sft", "sft.max_num_steps=8"], ["all_reduce"])
    return sft + measure(directory / "grpo", [], ["quantum", "refit"])


@pytest.mark.parametrize("place", PLACES)
def test_the_run_goes_on(faults: list[Fault], place: str) -> None:
    (fault,) = [fault for fault in faults if fault.place == place]
    assert fault.steps_compared >= 2
    if place == "all_reduce":
        assert fault.resumed_from_step == DEATH_AT[place], "the newest checkpoint"
    assert fault.loss_difference < 1e-3 and fault.grad_norm_difference < 1e-2
