"""A user's file with a loss and an advantage trains, in the synchronous and the asynchronous loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.examples import own_loss
from dagrl.run.loops.grpo import run_grpo
from tests.integration.test_async_grpo import ASYNC, configuration, one_cluster, steps_of

__all__ = ["one_cluster"]  # a fixture

OWN = {
    "loss_fn": {"name": "dagrl.examples.own_loss:soft_clip", "args": {"width": 0.5}},
    "advantage": {"name": "dagrl.examples.own_loss:rank"},
}


@pytest.mark.parametrize("grpo", [{}, {"async_grpo": ASYNC}], ids=["synchronous", "in flight"])
def test_a_file_of_the_users_trains(grpo: dict[str, Any], tmp_path: Path) -> None:
    config = configuration(tmp_path, "own", grpo={"max_num_steps": 8, **grpo}, **OWN)
    run_grpo(config)
    steps = steps_of(config)
    assert len(steps) == 8
    assert steps[0]["own/bounded_ratio"] == pytest.approx(1.0, abs=0.2)
    rewards = [step["reward/mean"] for step in steps]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2])  # sevens become more frequent


def test_the_example_ranks_completions() -> None:
    rewards = np.array([[3.0, 1.0, 1.0, 9.0], [2.0, 2.0, 5.0, 0.0]])
    valid = np.array([[True] * 4, [True, True, False, True]])
    found = own_loss.rank(rewards, valid)
    np.testing.assert_allclose(found, [[1 / 3, -2 / 3, -2 / 3, 1.0], [0.5, 0.5, 0.0, -1.0]])
