"""`dagrl attach` on GPUs: the processes of a killed driver's run go on with their models in the GPUs' memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dagrl.bench.gpu.faults import CONFIG
from tests.faults.test_attach import HOLD, WAITING, attaching, kill_driver, taken_over, wait_until
from tests.integration.main_job import Run, running

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

HELD = "reward.function=tests.faults.test_attach:held_sevens"
USUAL = ("checkpointing.save_period=3", "logger.log_level=INFO")


def losses(run: Run) -> dict[int, float]:
    found = [(int(line["step"]), float(line["loss"])) for line in run.metrics if "loss" in line]
    assert len(dict(found)) == len(found), "a step is there twice"
    return dict(found)


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=two_gpus)])
def test_sft_goes_on_with_the_workers_of_a_killed_driver(shards: int, tmp_path: Path) -> None:
    """An update that was lost, or applied twice, changes the losses of all later steps."""
    steps = 200
    sizes = ("algorithm=sft", f"sft.max_num_steps={steps}", f"policy.megatron_cfg.data_parallel_size={shards}", *USUAL)
    with running(str(CONFIG), tmp_path, "killed", *sizes, WAITING) as killed:
        killed.wait_for_step(8)
        workers = kill_driver(killed)
        assert len(workers) == shards
        with attaching(killed.directory) as driver:
            logged = taken_over(killed, workers, driver)
        assert shards > 1 or "Going on from step" in logged
        with running(str(CONFIG), tmp_path, "undisturbed", *sizes) as undisturbed:
            assert undisturbed.finish() == 0, undisturbed.shown
        found, expected = losses(killed), losses(undisturbed)
    assert list(found) == list(expected) == list(range(1, steps + 1))
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-3)


@two_gpus
def test_grpo_goes_on_with_the_workers_of_a_killed_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver dies while it waits for rewards: the train worker has the last step's state, the engine its weights."""
    hold, steps = tmp_path / "hold", 150  # few would be over before the hold is seen
    monkeypatch.setenv(HOLD, str(hold))
    with running(str(CONFIG), tmp_path, "killed", f"grpo.max_num_steps={steps}", HELD, *USUAL, WAITING) as killed:
        killed.wait_for_step(8)
        hold.touch()
        wait_until(lambda: hold.read_text() == "held", "no reward was asked for")
        workers = kill_driver(killed)
        assert len(workers) == 2
        monkeypatch.delenv(HOLD)
        with attaching(killed.directory) as driver:
            assert "Going on from step" in taken_over(killed, workers, driver)
        found = losses(killed)
    assert list(found) == list(range(1, steps + 1)) and np.isfinite(list(found.values())).all()
