"""Checkpoints of a run: directories that are whole or are not there, which to keep, and which to go on from.

    checkpoints/
      step_00000010/
        manifest.json      every file with its size, and the CRC-32 of small ones; written last
        state.json         step, data position, policy version, counters, metric
        train/ ...         what the workers wrote
      step_00000020.tmp/   a save that is running, or was cut off by a crash
      step_00000005.old/   a checkpoint on its way out

    store = CheckpointStore(directory, keep_top_k=2, keep_last_k=3)
    store.recover(resume=True)                        # once, at the start
    latest = store.latest()                           # None, or a verified checkpoint to go on from
    with store.saving(TrainState(step=10, ...)) as directory:
        train.call("save_checkpoint", str(directory / "train"))

Only files are handled here; workers read and write their own parts.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from dagrl.config import Json
from dagrl.errors import CheckpointError
from dagrl.files import naming, sync_directory, sync_tree, write_whole

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
SMALL_FILE_BYTES = 1 << 20  # above it a checksum would take long; truncation is still seen by the size
_NAME = re.compile(r"step_(\d{8,})(\.tmp|\.old)?")


@dataclass(frozen=True)
class TrainState:
    """What the driver must know to go on after `step`, which is the policy's version too.

    `counters` is for what the loop keeps, such as positions in the data; `metric` is the value that `keep_top_k` and `best`
    go by, None where this very step did not measure it.
    """

    step: int
    counters: Mapping[str, Json] = field(default_factory=dict)
    metric: float | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint on disk."""

    directory: Path
    state: TrainState


class CheckpointStore:
    """The checkpoints of one run, below `root`.

    Kept are the `keep_top_k` best by `metric` (of equal ones the newest; while there are fewer, the newest without a metric
    fill up), and the `keep_last_k` newest, at least one. None of both keeps all. A directory whose state cannot be read is
    none of these, and stays: it may be of another version of dagrl, or be mended.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep_top_k: int | None = None,
        keep_last_k: int | None = None,
        higher_is_better: bool = True,
    ) -> None:
        self.root = root
        self._keep_best, self._keep_last = keep_top_k, keep_last_k
        self._sign = 1.0 if higher_is_better else -1.0
        self._unreadable: set[Path] = set()  # those that were warned of

    def recover(self, *, resume: bool) -> None:
        """Clean up after a crash; call once, before anything is saved or loaded.

        Saves that were cut off are removed, one that was complete but for its last rename is finished. Raises
        CheckpointError if there are checkpoints although the run does not resume: they would be mixed with new ones.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        for path, _, suffix in self._entries():
            if suffix == ".tmp" and _is_whole(path) and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            elif suffix:
                logger.info("removing %s, left over from a save that did not finish", path)
                shutil.rmtree(path)
        if not resume and (found := self._directories()):
            raise CheckpointError(
                f"{self.root} already holds {len(found)} checkpoints of an earlier run, up to {found[-1].name}; a new run "
                "expects none. Set checkpointing.resume=true to go on, or checkpointing.checkpoint_dir to another place"
            )

    @contextmanager
    def saving(self, state: TrainState) -> Iterator[Path]:
        """A directory to write a checkpoint into; it gets its name when the block ends, and is removed if it raises."""
        with self.writing(state) as directory:
            yield directory
        self.publish(state, directory)

    @contextmanager
    def writing(self, state: TrainState) -> Iterator[Path]:
        """An empty directory to begin a checkpoint in; `publish` completes it. It is removed if the block raises."""
        directory = self._final(state).with_suffix(".tmp")
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
        with self.discarding(directory):
            yield directory

    def publish(self, state: TrainState, directory: Path) -> None:
        """Give a checkpoint whose parts are all written its name, and remove those that need not be kept."""
        with self.discarding(directory):
            write_whole(directory / STATE, json.dumps({"format": FORMAT, **asdict(state)}, indent=1))
            _write_manifest(directory)
            sync_tree(directory)
        final = self._final(state)
        self._remove(final)
        directory.rename(final)
        sync_directory(self.root)
        self._prune()

    @contextmanager
    def discarding(self, directory: Path) -> Iterator[None]:
        """Remove `directory` if the block raises."""
        try:
            with naming(directory):
                yield
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    def _final(self, state: TrainState) -> Path:
        return self.root / f"step_{state.step:08d}"

    def all(self) -> list[Checkpoint]:
        """Every finished checkpoint, by step, save those whose state cannot be read, of which each is warned of once.

        Only `state.json` is read; see `verify`.
        """
        read = [(path, self._read_or_warn(path)) for path in self._directories()]
        return [Checkpoint(path, state) for path, state in read if state is not None]

    def _read_or_warn(self, directory: Path) -> TrainState | None:
        try:
            return read_state(directory)
        except CheckpointError as error:
            if directory not in self._unreadable:
                logger.warning("%s is neither ranked nor removed: %s", directory, error)
            self._unreadable.add(directory)
            return None

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, verified; None when there is none. Raises CheckpointError when it is damaged."""
        found = self._directories()
        return load_checkpoint_directory(found[-1]) if found else None

    def best(self) -> Checkpoint | None:
        """The checkpoint with the best metric (of equal ones the newest), verified; None when none has a metric."""
        ranked = [checkpoint for checkpoint in self._ranked(self.all()) if _has_metric(checkpoint)]
        return load_checkpoint_directory(ranked[0].directory) if ranked else None

    def _ranked(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """Best first; without a metric last; of equal ones the newest first."""

        def rank(checkpoint: Checkpoint) -> tuple[bool, float, int]:
            measured = _has_metric(checkpoint)
            return (measured, self._sign * (checkpoint.state.metric or 0.0) if measured else 0.0, checkpoint.state.step)

        return sorted(checkpoints, key=rank, reverse=True)

    def _prune(self) -> None:
        if self._keep_best is None and self._keep_last is None:
            return
        checkpoints = self.all()
        best = self._ranked(checkpoints)[: self._keep_best or 0]
        for checkpoint in checkpoints[: -(self._keep_last or 1)]:
            if checkpoint not in best:
                self._remove(checkpoint.directory)

    def _remove(self, directory: Path) -> None:
        """Remove a checkpoint by renaming it first, so that a crash cannot leave half of it under its name."""
        if directory.exists():
            doomed = directory.rename(directory.with_suffix(".old"))
            shutil.rmtree(doomed)

    def _directories(self) -> list[Path]:
        return [path for path, _, suffix in self._entries() if not suffix]

    def _entries(self) -> list[tuple[Path, int, str]]:
        """Path, step and suffix of every checkpoint directory, finished or not, by step."""
        if not self.root.is_dir():
            return []
        found = [(path, _NAME.fullmatch(path.name)) for path in self.root.iterdir() if path.is_dir()]
        named = [(path, int(match[1]), match[2] or "") for path, match in found if match]
        return sorted(named, key=lambda entry: entry[1:])


def load_checkpoint_directory(directory: Path) -> Checkpoint:
    """Verify a checkpoint directory and read its state. Raises CheckpointError saying what is wrong."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not there; expected the directory of a checkpoint, such as step_00000010")
    verify(directory)
    return Checkpoint(directory, read_state(directory))


def verify(directory: Path) -> None:
    """Compare a checkpoint with its manifest. Raises CheckpointError naming the first file that differs, and how."""
    for name, entry in _read_manifest(directory).items():
        path = directory / name
        if not path.is_file():
            raise _damaged(directory, f"the file {name} is missing")
        if (size := path.stat().st_size) != entry["size"]:
            raise _damaged(directory, f"{name} has {size} bytes; its manifest says {entry['size']}")
        if entry["crc32"] is not None and _crc32(path) != entry["crc32"]:
            raise _damaged(directory, f"{name} has other content than when it was saved (its CRC-32 differs)")


def read_state(directory: Path) -> TrainState:
    """`state.json` of a checkpoint."""
    content = _read_json(directory, STATE)
    try:
        state = TypeAdapter(TrainState).validate_python({name: value for name, value in content.items() if name != "format"})
    except ValidationError as error:
        raise CheckpointError(f"{directory / STATE} is not a state that this version of dagrl wrote: {error}") from error
    if directory.name.split(".")[0] != f"step_{state.step:08d}":
        raise CheckpointError(
            f"{directory} holds the state of step {state.step}; it was renamed or copied. Give it back its name"
        )
    return state


def _has_metric(checkpoint: Checkpoint) -> bool:
    return checkpoint.state.metric is not None and math.isfinite(checkpoint.state.metric)


def _write_manifest(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    entries = {
        path.relative_to(directory).as_posix(): {
            "size": path.stat().st_size,
            "crc32": _crc32(path) if path.stat().st_size <= SMALL_FILE_BYTES else None,
        }
        for path in files
    }
    write_whole(directory / MANIFEST, json.dumps({"format": FORMAT, "files": entries}, indent=1))


def _read_manifest(directory: Path) -> dict[str, dict[str, int | None]]:
    files = _read_json(directory, MANIFEST).get("files")
    if not isinstance(files, dict) or STATE not in files:
        raise _damaged(directory, f"{MANIFEST} does not list {STATE}")
    return files


def _read_json(directory: Path, name: str) -> dict[str, object]:
    path = directory / name
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has no {name}: it is not a checkpoint of dagrl, or a part of one. "
            "Name a directory step_<number> that a run wrote"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise _damaged(directory, f"{name} is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path} has format {found!r}; this version of dagrl reads format {FORMAT}")
    return content


def _is_whole(directory: Path) -> bool:
    try:
        load_checkpoint_directory(directory)
    except CheckpointError:
        return False
    return True


def _damaged(directory: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {directory} is damaged: {what}. Remove the directory to go on from the checkpoint before it"
    )


def _crc32(path: Path) -> int:
    return zlib.crc32(path.read_bytes())
