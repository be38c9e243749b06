"""Files of rollouts: complete or absent, bounded, and without the steps that a resumed run repeats."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import pytest
from pyarrow import parquet

from dagrl.telemetry import rollouts
from dagrl.telemetry.rollouts import OTHER, RolloutFiles, read_rollouts, rollout_files, table_of
from tests.unit.run.full_disk import full_disk

ROW = {
    "step": 3,
    "group": 7,
    "place": 1,
    "prompt": "1+1=",
    "reward": 1.0,
    "reward_parts": {"function": 1.0},
    "tokens": [4, 5],
    "logprobs": [-0.5, -1.5],
    "sampled": [True, False],
    "turns": [{"role": "policy", "text": "2", "start": 0, "end": 1, "reward": None}],
}


def test_rows_are_read_back_by_any_reader(tmp_path: Path) -> None:
    RolloutFiles(tmp_path / "rollouts", max_bytes=None).write(3, table_of([ROW]))
    path = rollout_files(tmp_path / "rollouts")[3]
    (row,) = parquet.read_table(path).to_pandas().to_dict("records")
    assert row["logprobs"].tolist() == [-0.5, -1.5] and row["turns"][0]["text"] == "2" and math.isnan(row["advantage"])
    (row,) = read_rollouts(path)
    assert {key: row[key] for key in ROW} == ROW and row["train_logprobs"] is None
    assert read_rollouts(path, ["reward"]) == [{"reward": 1.0}]


def test_the_oldest_steps_are_deleted_above_the_limit(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path, max_bytes=None)
    for step in range(1, 5):
        files.write(step, table_of([ROW]))
    size = rollout_files(tmp_path)[1].stat().st_size
    bounded = RolloutFiles(tmp_path, max_bytes=int(2.5 * size), resumed_step=4)
    bounded.write(5, table_of([ROW]))
    assert list(rollout_files(tmp_path)) == [4, 5]
    RolloutFiles(tmp_path, max_bytes=1, resumed_step=5).write(6, table_of([ROW]))
    assert list(rollout_files(tmp_path)) == [6]


def test_a_resumed_run_deletes_the_steps_it_repeats(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path, max_bytes=None)
    for step in (1, 2, 3):
        files.write(step, table_of([ROW]))
        files.write(step, table_of([ROW]), OTHER)
    RolloutFiles(tmp_path, max_bytes=None, resumed_step=2)
    assert list(rollout_files(tmp_path)) == list(rollout_files(tmp_path, OTHER)) == [1, 2]


def test_samples_that_were_not_trained_on_count_in_the_limit(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path, max_bytes=1)
    files.write(1, table_of([ROW]), OTHER)
    files.write(1, table_of([ROW]))
    assert list(rollout_files(tmp_path, OTHER)) == [] and list(rollout_files(tmp_path)) == [1], "the newest file is kept"
    files.write(2, table_of([ROW]), OTHER)
    assert list(rollout_files(tmp_path)) == [] and list(rollout_files(tmp_path, OTHER)) == [2]


def test_writing_a_step_does_not_list_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files a step are 200,000 after 100,000 steps. A file that is written again counts once."""
    files = RolloutFiles(tmp_path, max_bytes=None)
    files.write(1, table_of([ROW]))
    size = rollout_files(tmp_path)[1].stat().st_size
    files = RolloutFiles(tmp_path, max_bytes=int(2.5 * size), resumed_step=1)

    def never(*words: object) -> dict[int, Path]:
        raise AssertionError("the directory was listed")

    with monkeypatch.context() as patch:
        patch.setattr(rollouts, "rollout_files", never)
        for step in (2, 2, 2, 3):
            files.write(step, table_of([ROW]))
    assert list(rollout_files(tmp_path)) == [2, 3]


def test_a_full_disk_error_names_the_file_and_leaves_no_part(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path, max_bytes=None)
    with full_disk(500), pytest.raises(OSError) as actual:
        files.write(1, table_of([ROW] * 1000))
    assert actual.value.errno in (errno.ENOSPC, errno.EFBIG) and "step_000001" in str(actual.value.filename)
    assert list(tmp_path.iterdir()) == []
