"""Checkpoints that workers write in the background, and the samples kept for them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest

from dagrl.config import Config
from dagrl.errors import CheckpointError, StopRequestedError
from dagrl.files import FileEntry
from dagrl.run.checkpoint_store import MANIFEST, SMALL_FILE_BYTES, CheckpointStore, TrainState
from dagrl.run.checkpoints import Checkpoints, load_role
from dagrl.run.model import character_tokenizer
from dagrl.run.rollout_log import WAITING, KeptSamples, RolloutLog
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.rollouts import RolloutFiles, rollout_files
from tests.unit.rl.test_episodes import scored
from tests.unit.run.saving import full_disk, saving


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
            return [{"part": FileEntry(7, 9)}, None] if len(args) == 1 else [None, None]
        if method == "finish_checkpoint" and self.error is not None:
            raise self.error
        return [None, {"part": FileEntry(7, 9)}] if method == "finish_checkpoint" else [True, self.written]


def make(tmp_path: Path, background: bool) -> tuple[Checkpoints, Writers]:
    sections = {"data": {}, "policy": {}, "checkpointing": {"async_save": background}}
    config = Config.model_validate({"name": "t", "algorithm": "sft", **sections})
    writers, store = Writers(), CheckpointStore(tmp_path / "checkpoints", keep_top_k=1)
    return Checkpoints(config, store, {"train": cast(WorkerGroup, writers)}, MagicMock(), MagicMock()), writers


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.state = TrainState(step)
    checkpoints.save()


def entry(directory: Path) -> object:
    return json.loads((directory / MANIFEST).read_text())["files"]["train/part"]


def steps(checkpoints: Checkpoints) -> list[int]:
    return [checkpoint.state.step for checkpoint in checkpoints.store.all()]


def test_a_synchronous_save_is_complete_on_return(tmp_path: Path) -> None:
    checkpoints, writers = make(tmp_path, background=False)
    save(checkpoints, 1)
    (latest,) = checkpoints.store.all()
    assert (latest.directory / "train" / "part").exists() and writers.calls == ["save_checkpoint"]
    assert entry(latest.directory) == {"size": 7, "crc32": 9}, "as the worker said, without reading it again"


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
    assert entry(checkpoints.store.root / "step_00000002") == {"size": 7, "crc32": 9}


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
    says = r"step_00000001\.tmp/train, but the driver does not find it: their hosts do not share"
    with pytest.raises(CheckpointError, match=says):
        save(checkpoints, 1)
        checkpoints.save_last()
    assert steps(checkpoints) == [] and not list(checkpoints.store.root.glob("*.tmp"))


class Readers:
    """Three train workers whose processes are this one."""

    def __init__(self) -> None:
        self.read: list[list[str]] = []
        self.loaded: list[str] = []
        self.actors = [SimpleNamespace(__ray_call__=SimpleNamespace(remote=self._run)) for _ in range(3)]

    def _run(self, function: Any, checkpoint: Path, share: dict[str, FileEntry]) -> Any:
        self.read.append(sorted(share))
        return function(None, checkpoint, share)

    def wait(self, refs: list[Any], deadline: Deadline, method: str) -> list[Any]:
        return refs

    def call(self, method: str, directory: str, *, deadline: Deadline) -> None:
        self.loaded.append(directory)


def test_each_large_file_is_verified_by_one_worker_before_loading(tmp_path: Path) -> None:
    store, readers = CheckpointStore(tmp_path), Readers()
    with saving(store, TrainState(1)) as directory:
        for name in ("train", "critic"):
            (directory / name).mkdir()
            for number in range(4):
                (directory / name / f"{number}").write_bytes(bytes(SMALL_FILE_BYTES + 1))
            (directory / name / "small").touch()
    latest, deadline = store.latest(), Deadline(1.0, "t")
    load_role(cast(WorkerGroup, readers), "train", latest.directory, deadline)
    assert readers.read == [["train/0", "train/3"], ["train/1"], ["train/2"]]
    assert readers.loaded == [str(latest.directory / "train")]
    with (latest.directory / "train" / "2").open("r+b") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match=r"train/2 is damaged: its CRC-32 differs from the manifest's; remove .*step_"):
        load_role(cast(WorkerGroup, readers), "train", latest.directory, deadline)
    assert len(readers.loaded) == 1


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
        keep(log, 6)  # of a step that fails
    assert list(rollout_files(tmp_path)) == [1, 2, 3, 4, 5]


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
