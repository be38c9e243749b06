"""A file of the user's trains: an algorithm, or a loss and an advantage, in the synchronous and the asynchronous loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.cli.main import main
from dagrl.config.file import dump_config
from dagrl.examples import own_loss
from dagrl.run.train import train
from tests.integration.test_async_grpo import ASYNC, configuration, one_cluster, steps_of

__all__ = ["one_cluster"]  # a fixture

OWN = {
    "loss_fn": {"name": "dagrl.examples.own_loss:soft_clip", "args": {"width": 0.5}},
    "advantage": {"name": "dagrl.examples.own_loss:rank"},
}


def assert_learned(steps: list[dict[str, Any]]) -> None:
    assert len(steps) == 8
    rewards = [step["reward/mean"] for step in steps]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2])  # sevens become more frequent


@pytest.mark.slow  # test_stop.py has a run with them
def test_a_loss_and_an_advantage_train(tmp_path: Path) -> None:
    config = configuration(tmp_path, "own", grpo={"max_num_steps": 8}, **OWN)
    train(config)
    steps = steps_of(config)
    assert_learned(steps)
    assert steps[0]["own/bounded_ratio"] == pytest.approx(1.0, abs=0.2)


def test_an_algorithm_trains_from_the_command_line(tmp_path: Path) -> None:
    config = configuration(tmp_path, "own", grpo={"max_num_steps": 8, "async_grpo": ASYNC})
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert main(["train", str(path), "algorithm=dagrl.examples.own_algorithm:KlInReward"]) == 0
    steps = steps_of(config)
    assert_learned(steps)
    assert {step["stage"] for step in steps} == {"KlInReward"}
    assert steps[0]["own/distance"] == pytest.approx(0.0, abs=1e-6) and abs(steps[-1]["own/distance"]) > 1e-3


def test_the_example_ranks_completions() -> None:
    rewards = np.array([[3.0, 1.0, 1.0, 9.0], [2.0, 2.0, 5.0, 0.0]])
    valid = np.array([[True] * 4, [True, True, False, True]])
    found = own_loss.rank(rewards, valid)
    np.testing.assert_allclose(found, [[1 / 3, -2 / 3, -2 / 3, 1.0], [0.5, 0.5, 0.0, -1.0]])
