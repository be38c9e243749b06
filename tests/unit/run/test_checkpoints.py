"""Checkpoints that workers write in the background: when they are published, and what happens if writing fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from dagrl.config import Config
from dagrl.errors import CheckpointError
from dagrl.run.checkpoint_store import CheckpointStore, TrainState
from dagrl.run.checkpoints import Checkpoints, DriverPart
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.worker_group import WorkerGroup


class Writers:
    """Two train workers, one of them slow."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.written = True
        self.error: Exception | None = None
        self.elsewhere: Path | None = None

    def call(self, method: str, *args: Any, deadline: Deadline | None = None) -> list[Any]:
        assert deadline == Deadline(240.0, "2 * timeouts.checkpoint_s"), "not the start timeout"
        self.calls.append(method)
        if method == "save_checkpoint":
            directory = self.elsewhere or Path(args[0])
            directory.mkdir()
            (directory / "part").write_text("weights")
        if method == "finish_checkpoint" and self.error is not None:
            raise self.error
        return [True, self.written]


def make(tmp_path: Path, background: bool) -> tuple[Checkpoints, Writers]:
    config = Config.model_validate(
        {"name": "t", "algorithm": "sft", "data": {}, "policy": {}, "checkpointing": {"async_save": background}}
    )
    writers, store = Writers(), CheckpointStore(tmp_path / "checkpoints", keep_top_k=1)
    return Checkpoints(config, store, {"train": cast(WorkerGroup, writers)}, MagicMock(), MagicMock()), writers


def save(checkpoints: Checkpoints, step: int, *parts: DriverPart) -> None:
    checkpoints.state, checkpoints.parts = TrainState(step), [*parts]
    checkpoints.save()


def steps(checkpoints: Checkpoints) -> list[int]:
    return [checkpoint.state.step for checkpoint in checkpoints.store.all()]


def test_a_synchronous_save_is_complete_on_return(tmp_path: Path) -> None:
    checkpoints, writers = make(tmp_path, background=False)
    save(checkpoints, 1, lambda directory: (directory / "driver").touch())
    latest = checkpoints.store.latest()
    assert latest is not None and (latest.directory / "driver").exists() and (latest.directory / "train" / "part").exists()
    assert writers.calls == ["save_checkpoint"]


def test_a_background_save_is_published_when_all_workers_have_written(tmp_path: Path) -> None:
    checkpoints, writers = make(tmp_path, background=True)
    writers.written = False
    save(checkpoints, 1)
    checkpoints.finish_step(TrainState(1))
    assert steps(checkpoints) == []
    writers.written = True
    checkpoints.finish_step(TrainState(1))
    checkpoints.finish_step(TrainState(1))
    assert steps(checkpoints) == [1] and writers.calls.count("finish_checkpoint") == 1


def test_the_next_save_and_the_end_wait_for_the_pending_one(tmp_path: Path) -> None:
    checkpoints, writers = make(tmp_path, background=True)
    writers.written = False
    save(checkpoints, 1)
    save(checkpoints, 2)
    assert steps(checkpoints) == [1]
    checkpoints.save_last()
    assert steps(checkpoints) == [2]  # and keep_top_k holds


def test_a_failed_background_save_is_an_error_and_keeps_the_earlier_one(tmp_path: Path) -> None:
    checkpoints, writers = make(tmp_path, background=True)
    save(checkpoints, 1)
    checkpoints.save_last()
    save(checkpoints, 2)
    writers.error = CheckpointError("the disk is full")
    with pytest.raises(CheckpointError, match="the disk is full"):
        checkpoints.save_last()
    assert steps(checkpoints) == [1] and not list(checkpoints.store.root.glob("*.tmp"))
    checkpoints.save_last()  # nothing is pending any more


@pytest.mark.parametrize("background", [False, True])
def test_weights_on_another_host_are_an_error(tmp_path: Path, background: bool) -> None:
    checkpoints, writers = make(tmp_path, background)
    writers.elsewhere = tmp_path / "of_another_host"
    with pytest.raises(
        CheckpointError,
        match=r"step_00000001\.tmp/train, but the driver does not find it: their hosts do not share",
    ):
        save(checkpoints, 1)
        checkpoints.save_last()
    assert steps(checkpoints) == [] and not list(checkpoints.store.root.glob("*.tmp"))
