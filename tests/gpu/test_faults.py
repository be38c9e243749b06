"""Workers killed in an all-reduce, a quantum and a refit: the run goes on, and losses are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.faults.dying import PLACES
from tests.faults.killing import CONFIG, DEATH_AT, measure

pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


REPLICAS = ("policy.megatron_cfg.data_parallel_size=2", "checkpointing.save_period=1")


@pytest.fixture(scope="module")
def faults() -> list[dict[str, Any]]:
    """Of a GRPO run; of two runs on two GPUs, as an all-reduce takes both."""
    if torch.cuda.device_count() >= 3:
        return measure(CONFIG, REPLICAS)
    sft = measure(CONFIG, [*REPLICAS, "algorithm=sft", "sft.max_num_steps=8"], ["all_reduce"])
    return sft + measure(CONFIG, [], ["quantum", "refit"])


@pytest.mark.parametrize("place", PLACES)
def test_the_run_goes_on(faults: list[dict[str, Any]], place: str) -> None:
    (fault,) = [fault for fault in faults if fault["place"] == place]
    assert fault["role"] == ("train" if place == "all_reduce" else "generation")
    assert (
        fault["phase"]
        in {"all_reduce": ("train_step", "demonstration_step"), "quantum": ("generate",), "refit": ("refit",)}[place]
    )
    assert fault["steps_compared"] >= 2
    if place == "all_reduce":
        assert fault["resumed_from_step"] == DEATH_AT[place], "the newest checkpoint"
    assert fault["loss_difference"] < 1e-3 and fault["grad_norm_difference"] < 1e-2
