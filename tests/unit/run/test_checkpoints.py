"""Checkpoints: complete or absent, verified and pruned, also those written in the background; the samples kept for them."""

import errno
import json
import logging
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest

from dagrl.config import Config
from dagrl.errors import CheckpointError, DeadlineError, StopRequestedError
from dagrl.files import FileEntry, discarding, replace_directory
from dagrl.run import checkpoint_store
from dagrl.run.checkpoint_store import MANIFEST, SMALL_FILE_BYTES, CheckpointStore, TrainState, large_files
from dagrl.run.checkpoints import Checkpoints, load_role
from dagrl.run.model import character_tokenizer
from dagrl.run.rollout_log import WAITING, KeptSamples, RolloutLog
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.rollouts import RolloutFiles, rollout_files
from tests.unit.rl.test_episodes import scored


class Writers:
    """Two train workers, one of them slow."""

    def __init__(self) -> None:
        self.calls, self.written = list[str](), True
        self.errors: dict[str, Exception] = {}
        self.elsewhere: Path | None = None

    def call(self, method: str, *args: Any, deadline: Deadline | None = None) -> list[Any]:
        assert deadline == Deadline(240.0, "2 * timeouts.checkpoint_s"), "not the start timeout"
        self.calls.append(method)
        if method == "save_checkpoint":
            directory = self.elsewhere or Path(args[0])
            directory.mkdir()
            (directory / "part").write_text("weights")
            return [{"part": FileEntry(7, 9)}, None] if len(args) == 1 else [None, None]
        if method in self.errors:
            raise self.errors[method]
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


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.state.step for checkpoint in store.all()]


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
    assert steps(checkpoints.store) == []
    writers.written = True
    checkpoints.finish_step(TrainState(1))
    checkpoints.finish_step(TrainState(1))
    assert steps(checkpoints.store) == [1] and writers.calls.count("finish_checkpoint") == 1


def test_the_next_save_and_the_end_wait_for_the_pending_one(tmp_path: Path) -> None:
    checkpoints, writers = make(tmp_path, background=True)
    writers.written = False
    save(checkpoints, 1)
    save(checkpoints, 2)
    assert steps(checkpoints.store) == [1]
    checkpoints.save_last()
    assert steps(checkpoints.store) == [2]  # and keep_top_k holds
    assert entry(checkpoints.store.root / "step_00000002") == {"size": 7, "crc32": 9}


def test_a_failed_background_save_is_an_error_and_keeps_the_earlier_one(tmp_path: Path) -> None:
    checkpoints, writers = make(tmp_path, background=True)
    save(checkpoints, 1)
    checkpoints.save_last()
    for errors in {"finish_checkpoint": CheckpointError("disk")}, {"checkpoint_written": DeadlineError("hung")}:
        save(checkpoints, checkpoints.state.step + 1)
        writers.errors |= errors
        with pytest.raises(type(*errors.values())):
            checkpoints.save_last()
        assert steps(checkpoints.store) == [1] and not list(checkpoints.store.root.glob("*.tmp"))
    checkpoints.save_last()  # nothing is pending any more


def test_a_disk_that_a_background_save_fills_is_its_error(tmp_path: Path) -> None:
    checkpoints, _ = make(tmp_path, background=True)
    full = OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
    checkpoints.explain(full)
    save(checkpoints, 1)
    checkpoints.explain(OSError(errno.EACCES, "Permission denied", "metrics.jsonl"))
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: No space left on device, while .*step_00000001"):
        checkpoints.explain(full)
    assert not list(checkpoints.store.root.iterdir())


@pytest.mark.parametrize("background", [False, True])
def test_weights_on_another_host_are_an_error(tmp_path: Path, background: bool) -> None:
    checkpoints, writers = make(tmp_path, background)
    writers.elsewhere = tmp_path / "of_another_host"
    says = r"step_00000001\.tmp/train, but the driver does not find it: their hosts do not share"
    with pytest.raises(CheckpointError, match=says):
        save(checkpoints, 1)
        checkpoints.save_last()
    assert steps(checkpoints.store) == [] and not list(checkpoints.store.root.glob("*.tmp"))


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


def save_at(store: CheckpointStore, step: int, metric: float | None = None) -> Path:
    state = TrainState(step=step, counters={"tokens": 5}, metric=metric)
    with saving(store, state) as directory:
        (directory / "train").mkdir()
        (directory / "train" / "rank_0.pt").write_bytes(b"weights of step %d" % step)
    return store.root / f"step_{step:08d}"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_state_is_restored(store: CheckpointStore) -> None:
    assert store.latest() is None
    save_at(store, 10, metric=0.5)
    save_at(store, 9)
    latest = store.latest()
    assert latest.state == TrainState(10, counters={"tokens": 5}, metric=0.5)
    assert (latest.directory / "train" / "rank_0.pt").read_bytes() == b"weights of step 10"


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths synced to disk, in order, by their names at that time."""
    found: list[Path] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return found


def test_a_directory_is_synced_before_it_is_renamed(tmp_path: Path, store: CheckpointStore, on_disk: list[Path]) -> None:
    partial, target = tmp_path / "hf.partial", tmp_path / "hf"
    for directory, content in ((target, "old"), (partial, "new")):
        directory.mkdir()
        (directory / "config.json").write_text(content)
    replace_directory(partial, target)
    assert on_disk == [partial / "config.json", partial, tmp_path]
    assert [path.name for path in tmp_path.iterdir()] == ["hf"] and (target / "config.json").read_text() == "new"
    saved, written = save_at(store, 1), store.root / "step_00000001.tmp"
    assert {written, *(written / path.relative_to(saved) for path in saved.rglob("*"))} <= set(on_disk)
    assert on_disk[-1] == store.root  # where it got its name


@pytest.mark.parametrize("size", [0, 100])
def test_a_full_disk_names_the_checkpoint_and_keeps_earlier_ones(store: CheckpointStore, size: int) -> None:
    """Full while a part is written, or while the state is."""
    save_at(store, 1)
    state = TrainState(2, counters={"words": "x" * 200})
    with pytest.raises(OSError, match="File too large") as raised, full_disk(size), saving(store, state) as directory:
        (directory / "part").write_bytes(b"x" * 50)
    assert raised.value.filename == str(directory if size == 0 else directory / "state.json")
    assert steps(store) == [1] and [path.name for path in store.root.iterdir()] == ["step_00000001"]


def test_saving_a_step_again_replaces_it_and_what_was_left_of_it(store: CheckpointStore) -> None:
    leftover = store.root / "step_00000003.tmp" / "train"  # in the same process, after `recover`
    leftover.mkdir(parents=True)
    (leftover / "rank_1.pt").touch()
    for metric in (0.1, 0.9):
        saved = save_at(store, 3, metric)
        assert [path.name for path in (saved / "train").iterdir()] == ["rank_0.pt"]
    latest = store.latest()
    assert latest is not None and latest.state.metric == 0.9
    assert [path.name for path in store.root.iterdir()] == ["step_00000003"]


@pytest.mark.parametrize(
    ("best", "last", "higher", "metrics", "kept"),
    [
        (None, None, True, [1, 2, 3], [1, 2, 3]),
        (2, None, True, [None, None, None], [2, 3]),
        (1, None, True, [0.9, 0.5, 0.1], [1, 3]),  # the best and the newest
        (1, None, False, [0.4, 0.2, None, 0.3], [2, 4]),
        (2, None, True, [0.3, None, None, 0.2], [1, 4]),
        (2, None, True, [0.5, 0.5, 0.5], [2, 3]),
        (1, None, True, [0.5, float("nan"), float("nan")], [1, 3]),
        (1, 2, True, [0.9, 0.1, 0.8, 0.2], [1, 3, 4]),  # what either keeps
        (1, 2, True, [0.9, None, None, None, None], [1, 4, 5]),
        (None, 2, True, [0.9, 0.5, 0.1], [2, 3]),
    ],
)
def test_pruning(tmp_path: Path, best: Any, last: Any, higher: bool, metrics: list[float | None], kept: list[int]) -> None:
    store = CheckpointStore(tmp_path, keep_top_k=best, keep_last_k=last, higher_is_better=higher)
    for step, metric in enumerate(metrics, start=1):
        save_at(store, step, metric)
        assert steps(store)[-1] == step
    assert steps(store) == kept


def test_a_directory_in_use_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """On NFS a file that someone reads keeps its directory. It is removed after a later checkpoint."""
    store, removes = CheckpointStore(tmp_path, keep_last_k=1), shutil.rmtree

    def busy(path: Path, **keys: Any) -> None:
        if path.name.startswith(("step_00000001", "step_00000009")):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        removes(path, **keys)

    (tmp_path / "step_00000009.tmp" / "train").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        store.recover()
        for step in (1, 2):
            save_at(store, step)
    assert steps(store) == [2] and (tmp_path / "step_00000001.old").exists()
    assert "step_00000009.tmp (Directory not empty)" in caplog.text
    save_at(store, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000009.tmp"]
    store.recover()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


WEIGHTS, STATE = "train/rank_0.pt", "state.json"


def damage(path: Path, content: str | Path | None) -> None:
    """Overwrites a file, links it to another, or removes it."""
    if not isinstance(content, str):
        path.unlink()
    if isinstance(content, Path):
        path.symlink_to(content)
    elif content is not None:
        path.write_text(content)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (WEIGHTS, "wei", "0.pt is damaged: it has 3 bytes, the manifest says 17; remove .*/step_00000001 to resume"),
        (WEIGHTS, "weights of step X", "train/rank_0.pt is damaged: its CRC-32 differs"),
        (WEIGHTS, None, "rank_0.pt is missing; remove .*/step_00000001 to resume from the checkpoint before it"),
        (MANIFEST, None, "has no manifest.json"),
        (STATE, '{"format": 2, "st', "state.json is damaged: it has 17 bytes"),
        (MANIFEST, '{"format": 99}', r"format is not of this version of dagrl \(Input should be 2\)"),
        (MANIFEST, '{"format": 2, "files": {}}', "does not list state.json"),
    ],
)
def test_damage_is_an_error_naming_the_file(store: CheckpointStore, file: str, content: str | None, message: str) -> None:
    damage(save_at(store, 1) / file, content)
    with pytest.raises(CheckpointError, match=message):
        store.latest()


def test_large_files_of_workers_are_read_by_those_who_load_them(store: CheckpointStore, monkeypatch: Any) -> None:
    """Their sizes are compared. The driver reads its own files, however large."""
    monkeypatch.setattr(checkpoint_store, "SMALL_FILE_BYTES", 10)
    directory = save_at(store, 1)
    assert list(large_files(directory, "train")) == ["train/rank_0.pt"] and not large_files(directory, "critic")
    damage(directory / WEIGHTS, "weights of step X")
    assert store.latest() is not None
    damage(directory / WEIGHTS, "wei")
    with pytest.raises(CheckpointError, match="the manifest says 17"):
        store.latest()
    directory = save_at(store, 2)
    (directory / "state.json").write_text((directory / "state.json").read_text().replace("5", "6"))
    with pytest.raises(CheckpointError, match=r"state\.json is damaged: its CRC-32 differs"):
        store.latest()


@pytest.mark.parametrize("content", ["torn", None, Path("/proc/self/mem")], ids=["torn", "lost", "not readable by root"])
@pytest.mark.parametrize(("best", "last", "kept"), [(None, 2, [3, 4]), (1, None, [1, 4]), (1, 2, [1, 3, 4])])
def test_unreadable_checkpoints_are_kept(content: Any, best: Any, last: Any, kept: Any, tmp_path: Path, caplog: Any) -> None:
    store = CheckpointStore(tmp_path, keep_top_k=best, keep_last_k=last)
    save_at(store, 1, 0.9)
    damaged = save_at(store, 2, 0.8)
    damage(damaged / STATE, content)
    with caplog.at_level(logging.WARNING, "dagrl.run.checkpoint_store"):
        for step in (3, 4):
            save_at(store, step, 0.1)
    assert steps(store) == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:08d}" for step in sorted({2, *kept})]
    (warning,) = caplog.messages
    assert warning.startswith(f"{damaged} is neither ranked nor removed")


def test_a_copy_under_another_step_is_an_error(store: CheckpointStore) -> None:
    shutil.copytree(save_at(store, 1), store.root / "step_00000009")
    with pytest.raises(CheckpointError, match="holds the state of step 1"):
        store.latest()


@contextmanager
def saving(store: CheckpointStore, state: TrainState) -> Iterator[Path]:
    """Yields a directory for a checkpoint. Publishes it when the block ends; removes it if the block raises."""
    directory = store.begin(state)
    with discarding(directory):
        yield directory
    store.publish(state, directory)


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Makes writes of more than `size` bytes to a file of this process raise OSError in the block."""
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
