"""The examples of an algorithm, a loss and an advantage of one's own, and of a phase in a loop of one's own."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dagrl.cli.main import main
from dagrl.config.file import dump_config
from dagrl.examples import own_loss
from tests.integration.main_job import ROOT, steps_of
from tests.integration.test_async_grpo import ASYNC, configuration

OWN = {
    "loss_fn": {"name": "dagrl.examples.own_loss:soft_clip", "args": {"width": 0.5}},
    "advantage": {"name": "dagrl.examples.own_loss:rank"},
}


@pytest.mark.slow
@pytest.mark.usefixtures("one_cluster")
def test_an_algorithm_trains_from_the_command_line(tmp_path: Path) -> None:
    config = configuration(tmp_path, "own", grpo={"max_num_steps": 8, "async_grpo": ASYNC})
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert main(["train", str(path), "algorithm=dagrl.examples.own_algorithm:KlInReward"]) == 0
    steps = steps_of(config)
    rewards = [step["reward/mean"] for step in steps]
    assert len(steps) == 8 and np.mean(rewards[-3:]) > np.mean(rewards[:2])  # sevens become more frequent
    assert {step["stage"] for step in steps} == {"KlInReward"}
    assert steps[0]["own/distance"] == pytest.approx(0.0, abs=1e-6) and abs(steps[-1]["own/distance"]) > 1e-3


def test_the_example_ranks_completions() -> None:
    rewards = np.array([[3.0, 1.0, 1.0, 9.0], [2.0, 2.0, 5.0, 0.0]])
    valid = np.array([[True] * 4, [True, True, False, True]])
    found = own_loss.rank(rewards, valid)
    np.testing.assert_allclose(found, [[1 / 3, -2 / 3, -2 / 3, 1.0], [0.5, 0.5, 0.0, -1.0]])


EXAMPLE = ROOT / "examples" / "embed_phase.py"


def test_the_embedding_example_finds_the_slope() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "slope 3.000"


def test_the_embedding_example_is_short() -> None:
    """What is its own: neither blank nor an import."""
    lines = [line for line in EXAMPLE.read_text().splitlines()[1:] if line.strip()]
    assert sum(not line.startswith(("import ", "from ")) for line in lines) <= 30
