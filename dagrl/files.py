"""File operations: write files as a whole or not at all, and never overwrite unseen."""

import fcntl
import logging
import math
import os
import shutil
import socket
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dagrl.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

PART = ".part"  # suffix of a file that is being written, or was when the process was killed

PRIVATE = 0o750
"""Mode of directories that hold a user's data: samples, weights, configuration. Others cannot read below them."""

_READ_BYTES = 1 << 24


@dataclass(frozen=True)
class FileEntry:
    """A file's size and checksum."""

    size: int
    crc32: int


def fingerprint(path: Path) -> FileEntry:
    """Reads a file and returns its size and checksum."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return FileEntry(size, checksum)


def verify_files(directory: Path, files: Mapping[str, FileEntry], read_up_to: float = math.inf) -> None:
    """Raises CheckpointError for the first of a checkpoint's `files` that is missing or damaged.

    Files of more than `read_up_to` bytes are not read; their sizes are compared.
    """
    advice = f"remove {directory} to resume from the checkpoint before it"
    for name, entry in files.items():
        path = directory / name
        try:
            actual = fingerprint(path) if entry.size <= read_up_to else FileEntry(path.stat().st_size, entry.crc32)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing; {advice}") from error
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}; {advice}") from error
        if actual.size != entry.size:
            raise CheckpointError(f"{path} is damaged: it has {actual.size} bytes, the manifest says {entry.size}; {advice}")
        if actual != entry:
            raise CheckpointError(f"{path} is damaged: its CRC-32 differs from the manifest's; {advice}")


def write_whole(path: Path, content: str) -> None:
    """Writes `content` to `path`. After a crash, `path` is the old file or the new one, never a part of it."""
    with replacing(path) as part, part.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to, and renames that file to `path` after the block: it appears complete or not at all."""
    part = path.with_name(path.name + PART)
    try:
        with naming(path):
            yield part
    except OSError:
        part.unlink(missing_ok=True)
        raise
    part.replace(path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Names `path` in an OSError of the block that names no file, such as those of writes to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # else its message would be lost
            error.filename = error.filename or str(path)
        raise


@contextmanager
def discarding(directory: Path) -> Iterator[None]:
    """Removes `directory` if the block raises."""
    try:
        with naming(directory):
            yield
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def sync_tree(directory: Path) -> None:
    """Makes all files below `directory`, and their names, survive a power failure."""
    for parent, _, names in os.walk(directory):
        for name in names:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_aside(path: Path) -> Path | None:
    """Renames `path` to the first free of `run.1`, `run.2` (`trace.1.json`). Returns None if there was nothing."""
    return path.rename(free_name(path)) if path.exists() else None


def free_name(path: Path) -> Path:
    """Returns the first of `run.1`, `run.2` (`trace.1.json`) next to `path` that does not exist."""
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    number = 1
    while (free := path.with_name(f"{stem}.{number}{suffix}")).exists():
        number += 1
    return free


OLD = ".old"  # suffix of a directory that is being removed


def replace_directory(partial: Path, target: Path) -> None:
    """Moves a finished directory into place and deletes the old one.

    The content reaches the disk first, so that after a power failure no directory of that name is torn.
    """
    sync_tree(partial)
    old = target.with_name(target.name + OLD)
    if target.exists():
        remove_directory(old)
        target.rename(old)
    partial.rename(target)
    _sync(target.parent)  # makes renames there survive a power failure
    remove_directory(old)


def remove_directory(directory: Path) -> None:
    """Removes a directory, if it exists. Logs if it is in use, as by readers on NFS or a writer of a failed attempt."""
    try:
        if directory.exists():
            shutil.rmtree(directory)
    except OSError as error:
        logger.warning("cannot remove %s (%s); the next checkpoint or start tries it again", directory, error.strerror)


def require_writable(directory: Path, key: str) -> None:
    """Raises ConfigError, naming the configuration's `key`, unless files can be created in `directory`.

    Tries it in the nearest existing directory and leaves nothing, because permissions alone do not tell.
    """
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryDirectory(prefix=".dagrl-", dir=there).cleanup()
    except OSError as error:
        raise ConfigError(f"{key}: cannot write in {there} ({error.strerror}); name another directory") from error


@contextmanager
def locked(file: Path, what: str, advice: str) -> Iterator[None]:
    """Holds a lock on `file` for the block and writes the holder into it. Raises ConfigError if another process has the
    lock.

    The lock belongs to the open file, which child processes do not inherit, so it ends with this process in any case. Logs a
    warning on a file system without locks.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        _warn_of_no_lock(file, what, error)
        yield
        return
    try:
        _lock(descriptor, file, what, advice)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, file: Path, what: str, advice: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 1024, 0).decode(errors="replace").strip() or "another process"
        raise ConfigError(f"{what} is in use by {holder}, which has locked {file}; {advice}") from error
    except OSError as error:
        _warn_of_no_lock(file, what, error)
        return
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _warn_of_no_lock(file: Path, what: str, error: OSError) -> None:
    logger.warning("cannot lock %s (%s): nothing keeps other runs from %s", file, error.strerror, what)
