"""Checkpoint directories are complete or absent, verified and pruned; leftovers of a crash are removed."""

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dagrl.errors import CheckpointError
from dagrl.files import replace_directory
from dagrl.run import checkpoint_store
from dagrl.run.checkpoint_store import CheckpointStore, TrainState, large_files
from tests.unit.run.saving import full_disk, saving


def save(store: CheckpointStore, step: int, metric: float | None = None) -> Path:
    state = TrainState(step=step, counters={"tokens": 5}, metric=metric)
    with saving(store, state) as directory:
        (directory / "train").mkdir()
        (directory / "train" / "rank_0.pt").write_bytes(b"weights of step %d" % step)
    return store.root / f"step_{step:08d}"


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.state.step for checkpoint in store.all()]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_state_is_restored(store: CheckpointStore) -> None:
    assert store.latest() is None
    save(store, 10, metric=0.5)
    save(store, 9)
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
    saved, written = save(store, 1), store.root / "step_00000001.tmp"
    assert {written, *(written / path.relative_to(saved) for path in saved.rglob("*"))} <= set(on_disk)
    assert on_disk[-1] == store.root  # where it got its name


@pytest.mark.parametrize("size", [0, 100])
def test_a_full_disk_names_the_checkpoint_and_keeps_earlier_ones(store: CheckpointStore, size: int) -> None:
    """Full while a part is written, or while the state is."""
    save(store, 1)
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
        saved = save(store, 3, metric)
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
        save(store, step, metric)
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
            save(store, step)
    assert steps(store) == [2] and (tmp_path / "step_00000001.old").exists()
    assert "step_00000009.tmp (Directory not empty)" in caplog.text
    save(store, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000009.tmp"]
    store.recover()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


WEIGHTS, STATE, MANIFEST = "train/rank_0.pt", "state.json", "manifest.json"


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
    damage(save(store, 1) / file, content)
    with pytest.raises(CheckpointError, match=message):
        store.latest()


def test_large_files_of_workers_are_read_by_those_who_load_them(store: CheckpointStore, monkeypatch: Any) -> None:
    """Their sizes are compared. The driver reads its own files, however large."""
    monkeypatch.setattr(checkpoint_store, "SMALL_FILE_BYTES", 10)
    directory = save(store, 1)
    assert list(large_files(directory, "train")) == ["train/rank_0.pt"] and not large_files(directory, "critic")
    damage(directory / WEIGHTS, "weights of step X")
    assert store.latest() is not None
    damage(directory / WEIGHTS, "wei")
    with pytest.raises(CheckpointError, match="the manifest says 17"):
        store.latest()
    directory = save(store, 2)
    (directory / "state.json").write_text((directory / "state.json").read_text().replace("5", "6"))
    with pytest.raises(CheckpointError, match=r"state\.json is damaged: its CRC-32 differs"):
        store.latest()


@pytest.mark.parametrize("content", ["torn", None, Path("/proc/self/mem")], ids=["torn", "lost", "not readable by root"])
@pytest.mark.parametrize(("best", "last", "kept"), [(None, 2, [3, 4]), (1, None, [1, 4]), (1, 2, [1, 3, 4])])
def test_unreadable_checkpoints_are_kept(content: Any, best: Any, last: Any, kept: Any, tmp_path: Path, caplog: Any) -> None:
    store = CheckpointStore(tmp_path, keep_top_k=best, keep_last_k=last)
    save(store, 1, 0.9)
    damaged = save(store, 2, 0.8)
    damage(damaged / STATE, content)
    with caplog.at_level(logging.WARNING, "dagrl.run.checkpoint_store"):
        for step in (3, 4):
            save(store, step, 0.1)
    assert steps(store) == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:08d}" for step in sorted({2, *kept})]
    (warning,) = caplog.messages
    assert warning.startswith(f"{damaged} is neither ranked nor removed")


def test_a_copy_under_another_step_is_an_error(store: CheckpointStore) -> None:
    shutil.copytree(save(store, 1), store.root / "step_00000009")
    with pytest.raises(CheckpointError, match="holds the state of step 1"):
        store.latest()
