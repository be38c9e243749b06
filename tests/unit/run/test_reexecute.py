"""Steps executed again: differing records are named, the nearest to the cause first; what cannot be executed is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.config import Config
from dagrl.errors import ConfigError, RunError
from dagrl.run.checkpoint_store import CheckpointStore, TrainState
from dagrl.run.comparison import compare, report
from dagrl.run.reexecute import newest_checkpoint, replay_step
from dagrl.run.session import LastStep
from dagrl.telemetry.record import read_metrics
from dagrl.telemetry.rollouts import RolloutFiles, read_rollouts, rollout_files, table_of
from tests.unit.run.saving import saving
from tests.unit.telemetry.run_directory import make_run


def change(run: Path, step: int, sample: int, column: str, token: int | None, value: object) -> None:
    """Replaces one value of the rollouts."""
    rows = read_rollouts(rollout_files(run / "rollouts")[step])
    if token is None:
        rows[sample][column] = value
    else:
        rows[sample][column][token] = value
    RolloutFiles(run / "rollouts", max_bytes=None, resumed_step=step).write(step, table_of(rows))


def change_metric(run: Path, step: int, name: str, value: float) -> None:
    lines: list[dict[str, Any]] = [dict(line) for line in read_metrics(run / "metrics.jsonl")]
    lines[step - 1][name] = value
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def differences(old: Path, new: Path) -> list[str]:
    return compare(old, new, 2).differences


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return make_run(tmp_path, "old"), make_run(tmp_path, "new")


def test_equal_runs_are_equal_whatever_the_clock_says(runs: tuple[Path, Path]) -> None:
    old, new = runs
    change_metric(new, 2, "timing_s/total", 9.0)
    assert differences(old, new) == []


def test_one_bit_of_a_logprob_is_found(runs: tuple[Path, Path]) -> None:
    old, new = runs
    value = np.float32(read_rollouts(rollout_files(old / "rollouts")[2])[1]["logprobs"][3])
    change(new, 2, 1, "logprobs", 3, float(np.nextafter(value, np.float32(0))))
    (found,) = differences(old, new)
    assert re.match(r"step 2: logprobs of sample 1 at token 3 was -1\.38\d+, and is now -1\.38\d+", found)


def test_the_difference_nearest_to_the_cause_comes_first(runs: tuple[Path, Path]) -> None:
    old, new = runs
    change_metric(new, 2, "loss", 0.75)
    change(new, 2, 2, "reward", None, 1.0)
    change(new, 2, 3, "tokens", 4, 77)
    assert [text.split(" was ")[0] for text in differences(old, new)] == [
        "step 2: tokens of sample 3 at token 4",
        "step 2: reward of sample 2",
        "step 2: loss",
    ]


def test_a_step_that_was_not_executed_is_an_error(tmp_path: Path) -> None:
    old, new = make_run(tmp_path, "old"), make_run(tmp_path, "new", steps=1)
    with pytest.raises(RunError, match="step 2 was not executed"):
        differences(old, new)


def test_a_replay_starts_from_the_newest_checkpoint_before_its_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (2, 4, 6):
        with saving(store, TrainState(step)):
            pass
    found = [newest_checkpoint((tmp_path / "moved", tmp_path / "checkpoints"), range(step)) for step in (2, 3, 6, 9)]
    assert [path and path.name for path in found] == [None, "step_00000002", "step_00000004", "step_00000006"]


def test_the_report_says_what_was_equal_or_lists_the_first_differences(runs: tuple[Path, Path]) -> None:
    old, new = runs
    assert report(compare(old, new, 2)) == ("bit-equal: steps 1 to 2: 88 tokens with their log-probabilities, 8 metrics\n")
    change_metric(new, 2, "loss", 0.2501)
    found = compare(old, new, 2)
    found.weights = 26
    with pytest.raises(
        RunError, match=r"8 metrics, 26 tensors of weights differ\nstep 2: loss was 0.25, and is now 0.2501$"
    ):
        report(found)


def never(config: Config, step: LastStep) -> None:
    raise AssertionError("nothing may start")


def test_a_replay_rejects_steps_before_anything_starts(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    with pytest.raises(ConfigError, match=r"no config\.yaml; expected the directory of a run"):
        replay_step(tmp_path, 1, never)
    (run / "config.yaml").write_text("name: run\nalgorithm: grpo\npolicy: {}\ndata: {}\n")
    with pytest.raises(ConfigError, match=r"--step 3: .* has recorded steps 1 to 2"):
        replay_step(run, 3, never)
    ahead = "{async_grpo: {enabled: true, max_trajectory_age_steps: 1}}"
    (run / "config.yaml").write_text(
        f"name: run\nalgorithm: grpo\npolicy: {{generation: {{}}}}\ndata: {{}}\nsft: {{max_num_steps: 0}}\ngrpo: {ahead}\n"
    )
    with pytest.raises(ConfigError, match="trained asynchronously, and time decided which policy version"):
        replay_step(run, 2, never)
