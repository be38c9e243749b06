"""A step executed again in another layout; `test_main_job.py` has steps in their own layout, bit for bit."""

from __future__ import annotations

import pytest

from dagrl.run.comparison import report
from dagrl.run.reexecute import replay_step
from dagrl.run.train import train
from tests.integration.main_job import SFT_STEPS, Run
from tests.integration.test_async_grpo import one_cluster

TWO_RANKS = ("policy.megatron_cfg.data_parallel_size=1", "policy.megatron_cfg.tensor_model_parallel_size=2")


@pytest.mark.slow
def test_a_step_in_another_layout_is_within_bounds(learned: Run, cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas become two ranks, which sum in another order."""
    one_cluster.__wrapped__(None, monkeypatch)
    step = SFT_STEPS + 1
    found = replay_step(learned.directory, step, TWO_RANKS, train)
    assert [one.describe() for one in found.differences] == []
    assert (found.first_step, found.last_step) == (step, step)
    assert 0 < found.largest["train_logprobs"] < 1e-4 and 0 < found.largest["grad_norm"] < 1e-3
    assert "  grad_norm: differs by at most " in report(found)
