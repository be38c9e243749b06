"""Checkpoints of a run on disk: complete directories, which of them to keep, and which to resume from.

    checkpoints/
      step_00000010/
        manifest.json      every file with its size and CRC-32; written last
        state.json         step, data position, policy version, counters, metric
        train/ critic/     what the workers of these roles wrote
      step_00000020.tmp/   a save that is running, or was interrupted; whole if it has a manifest
      step_00000005.old/   a checkpoint being removed

    store = CheckpointStore(directory, keep_top_k=2, keep_last_k=3)
    store.recover()                                   # at the start
    latest = store.latest()                           # the verified newest checkpoint, or None
    directory = store.begin(state)
    with discarding(directory):
        ...                                           # write files into it
    store.publish(state, directory)

This module handles files only. Workers read and write their own parts.
"""

import json
import logging
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from dagrl.config import Json
from dagrl.errors import CheckpointError
from dagrl.files import (
    OLD,
    PRIVATE,
    FileEntry,
    discarding,
    fingerprint,
    remove_directory,
    replace_directory,
    sync_tree,
    verify_files,
    write_whole,
)

logger = logging.getLogger(__name__)

FORMAT: Final = 2
MANIFEST, STATE = "manifest.json", "state.json"
SMALL_FILE_BYTES = 1 << 20  # the driver reads files up to this size; the workers that load them read larger ones
Content = TypeVar("Content")
_NAME = re.compile(r"step_(\d{8,})(\.tmp|\.old)?")


@dataclass(frozen=True)
class TrainState:
    """The driver's state after `step`, which is also the policy version.

    `counters` hold the state of the loop, such as data positions. `metric` ranks the checkpoint for `keep_top_k`; it is None
    if this step did not measure it.
    """

    step: int
    counters: Mapping[str, Json] = field(default_factory=dict)
    metric: float | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint on disk."""

    directory: Path
    state: TrainState


@dataclass(frozen=True)
class _Manifest:
    format: Literal[2]
    files: dict[str, FileEntry]


class CheckpointStore:
    """The checkpoints of one run, below `root`.

    It keeps the `keep_top_k` best by `metric` and the `keep_last_k` newest, at least one. Among equal metrics the newest is
    better; checkpoints without a metric rank last. If both are None, all are kept. A directory whose state cannot be read is
    never removed: another version of dagrl may have written it, or it may be repaired.
    """

    def __init__(
        self, root: Path, *, keep_top_k: int | None = None, keep_last_k: int | None = None, higher_is_better: bool = True
    ) -> None:
        self.root = root
        self._keep_best, self._keep_last = keep_top_k, keep_last_k
        self._sign = 1.0 if higher_is_better else -1.0
        self._unreadable: set[Path] = set()  # already warned about

    def recover(self) -> None:
        """Cleans up after a crash. Call it before anything is saved or loaded.

        Removes interrupted saves, and completes a save that lacked only its final rename.
        """
        self.root.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        for path, _, suffix in self._entries():
            if suffix == ".tmp" and (path / MANIFEST).is_file():
                replace_directory(path, path.with_suffix(""))
            elif suffix:
                logger.info("removing %s, left over from a save that did not finish", path)
                remove_directory(path)

    def begin(self, state: TrainState) -> Path:
        """Returns an empty directory for a checkpoint that `publish` completes."""
        directory = self._final(state).with_suffix(".tmp")
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
        return directory

    def publish(self, state: TrainState, directory: Path, written: Mapping[str, FileEntry] | None = None) -> None:
        """Completes a checkpoint whose parts are all written, and removes checkpoints that need not be kept.

        `written` has files whose size and checksum are known, by their path in `directory`. The others are read.
        """
        with discarding(directory):
            write_whole(directory / STATE, json.dumps(asdict(state), indent=1))
            sync_tree(directory)
            paths = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
            known = written or {}
            manifest = _Manifest(FORMAT, {name: known.get(name) or fingerprint(path) for name, path in paths.items()})
            write_whole(directory / MANIFEST, json.dumps(asdict(manifest), indent=1))
        replace_directory(directory, self._final(state))
        self._prune()

    def _final(self, state: TrainState) -> Path:
        return self.root / f"step_{state.step:08d}"

    def all(self) -> list[Checkpoint]:
        """Returns every finished checkpoint by step. Skips those whose state cannot be read, with one warning each.

        Reads `state.json` only; see `verify`.
        """
        checkpoints = []
        for directory in self._directories():
            try:
                checkpoints.append(Checkpoint(directory, read_state(directory)))
            except CheckpointError as error:
                if directory not in self._unreadable:
                    logger.warning("%s is neither ranked nor removed: %s", directory, error)
                self._unreadable.add(directory)
        return checkpoints

    def latest(self) -> Checkpoint | None:
        """Returns the newest checkpoint, verified, or None. Raises CheckpointError if it is damaged."""
        directories = self._directories()
        return load_checkpoint_directory(directories[-1]) if directories else None

    def _prune(self) -> None:
        for path, _, suffix in self._entries():
            if suffix == OLD:
                remove_directory(path)
        if self._keep_best is None and self._keep_last is None:
            return
        checkpoints = self.all()
        best = sorted(checkpoints, key=self._rank, reverse=True)[: self._keep_best or 0]
        for checkpoint in checkpoints[: -(self._keep_last or 1)]:
            if checkpoint not in best:  # renamed first, so that a crash leaves no half of it under its name
                remove_directory(checkpoint.directory.rename(checkpoint.directory.with_suffix(OLD)))

    def _rank(self, checkpoint: Checkpoint) -> tuple[bool, float, int]:
        """Returns a sort key, higher is better: checkpoints without a metric are last, among equals the newest is first."""
        metric = checkpoint.state.metric
        measured = metric is not None and math.isfinite(metric)
        return measured, self._sign * metric if measured and metric else 0.0, checkpoint.state.step

    def _directories(self) -> list[Path]:
        return [path for path, _, suffix in self._entries() if not suffix]

    def _entries(self) -> list[tuple[Path, int, str]]:
        """Returns path, step and suffix of every checkpoint directory, finished or not, by step."""
        if not self.root.is_dir():
            return []
        matches = [(path, _NAME.fullmatch(path.name)) for path in self.root.iterdir() if path.is_dir()]
        entries = [(path, int(match[1]), match[2] or "") for path, match in matches if match]
        return sorted(entries, key=lambda entry: entry[1:])


def load_checkpoint_directory(directory: Path) -> Checkpoint:
    """Verifies a checkpoint directory and reads its state. Raises CheckpointError."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} does not exist; expected the directory of a checkpoint, such as step_00000010")
    verify(directory)
    return Checkpoint(directory, read_state(directory))


def verify(directory: Path) -> None:
    """Compares a checkpoint with its manifest, except the contents of `large_files`. Raises CheckpointError."""
    files = _read_manifest(directory)
    verify_files(directory, {name: entry for name, entry in files.items() if "/" not in name})
    verify_files(directory, {name: entry for name, entry in files.items() if "/" in name}, SMALL_FILE_BYTES)


def large_files(directory: Path, role: str) -> dict[str, FileEntry]:
    """Returns those files of a role's part whose contents `verify` does not read."""
    files = _read_manifest(directory).items()
    return {name: entry for name, entry in files if entry.size > SMALL_FILE_BYTES and name.startswith(f"{role}/")}


def read_state(directory: Path) -> TrainState:
    """Reads `state.json` of a checkpoint."""
    state = _read(directory, STATE, TrainState)
    if directory.name.split(".")[0] != f"step_{state.step:08d}":
        raise CheckpointError(
            f"{directory} holds the state of step {state.step}; it was renamed or copied. Rename it to its step"
        )
    return state


def _read_manifest(directory: Path) -> dict[str, FileEntry]:
    files = _read(directory, MANIFEST, _Manifest).files
    if STATE not in files:
        raise _damaged(directory, f"{MANIFEST} does not list {STATE}")
    if outside := [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name]:
        raise _damaged(directory, f"{MANIFEST} names {outside[0]!r}, which is not a file inside the checkpoint")
    return files


def _read(directory: Path, name: str, kind: type[Content]) -> Content:
    """Reads a JSON file of a checkpoint."""
    try:
        return TypeAdapter(kind).validate_json((directory / name).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory} has no {name}: it is not a complete checkpoint of dagrl, or a run still writes it. "
            "Name a directory step_<number> that a run has written"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {directory / name}: {error.strerror}") from error
    except ValidationError as error:
        what, *_ = error.errors()
        where = ".".join(["", *map(str, what["loc"])])
        raise _damaged(directory, f"{name}{where} is not of this version of dagrl ({what['msg']})") from error


def _damaged(directory: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {directory} is damaged: {what}. Remove the directory to resume from the checkpoint before it"
    )
