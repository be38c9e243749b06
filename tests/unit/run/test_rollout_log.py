"""The thread that writes `rollouts/`: nothing is lost at the end, and an error is raised by a later step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dagrl.errors import StopRequestedError
from dagrl.run.model import character_tokenizer
from dagrl.run.rollout_log import WAITING, KeptSamples, RolloutLog
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.shapes import Batch
from dagrl.telemetry.rollouts import RolloutFiles, rollout_files
from tests.unit.rl.test_record import scored
from tests.unit.run.full_disk import full_disk

TRAIN: Any = SimpleNamespace(role=SimpleNamespace(methods=()))  # workers that keep nothing
ROWS = np.ones((2, 4), np.float32)
BATCH = Batch({"lengths": np.full(2, 4), "loss_mask": ROWS, "advantages": ROWS, "row_ids": np.arange(2)})


def log_in(directory: Path) -> RolloutLog:
    files = RolloutFiles(directory, max_bytes=None)
    return RolloutLog(files, TRAIN, character_tokenizer("0123456789"), Deadline(10.0, "timeouts.replay_s"))


def keep(log: RolloutLog, step: int) -> KeptSamples:
    return log.keep([scored("stop", "stop", answered=(True, True))], BATCH, step)


def test_all_files_are_written_when_the_log_closes(tmp_path: Path) -> None:
    with log_in(tmp_path) as log:
        for step in range(1, 6):
            keep(log, step).write()
    assert list(rollout_files(tmp_path)) == [1, 2, 3, 4, 5]


def test_a_step_that_fails_writes_no_file(tmp_path: Path) -> None:
    with log_in(tmp_path) as log:
        keep(log, 1)
    assert not rollout_files(tmp_path)


def test_a_full_disk_is_an_error_of_one_of_the_next_steps(tmp_path: Path) -> None:
    with pytest.raises(OSError), full_disk(100), log_in(tmp_path) as log:
        for step in range(1, WAITING + 3):
            keep(log, step).write()
        pytest.fail("no error")


def test_a_full_disk_is_logged_when_the_run_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StopRequestedError), full_disk(100), log_in(tmp_path) as log:
        keep(log, 1).write()
        raise StopRequestedError
    assert "samples of the last steps are not in rollouts/: " in caplog.text and "step_000001.parquet" in caplog.text
