"""Workers killed in an all-reduce, a quantum and a refit: the run goes on by itself, and its losses are the same."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.dying import PLACES
from bench.gpu.faults import CONFIG, Fault, measure

pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def faults() -> list[Fault]:
    replicas = ["policy.megatron_cfg.data_parallel_size=2"] if torch.cuda.device_count() >= 3 else []
    return measure(CONFIG, replicas)


@pytest.mark.parametrize("place", PLACES)
def test_the_run_goes_on(faults: list[Fault], place: str) -> None:
    (fault,) = [fault for fault in faults if fault.place == place]
    assert fault.role == ("train" if place == "all_reduce" else "generation")
    assert fault.phase == {"all_reduce": "train_step", "quantum": "generate", "refit": "refit"}[place]
    assert fault.steps_compared >= 2
    assert fault.loss_difference < 1e-3
    assert fault.reward_difference < 1e-3
