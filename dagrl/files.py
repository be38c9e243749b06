"""Small file operations that a run relies on: files that appear whole or not at all, and nothing overwritten unseen."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dagrl.errors import ConfigError

logger = logging.getLogger(__name__)


PART = ".part"
"""Ends the name of a file that is being written, or was when the process was killed."""


def write_whole(path: Path, content: str) -> None:
    """Write `content` to `path` so that a crash leaves the old file or the new one, never a part under its name."""
    part = path.with_name(path.name + PART)
    try:
        with naming(path), part.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        part.unlink(missing_ok=True)
        raise
    part.replace(path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an OSError of the block name `path` if it names no file: those of writes, on a full disk, do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync_directory(directory: Path) -> None:
    """Make renames inside `directory` last through a power failure."""
    _sync(directory)


def sync_tree(directory: Path) -> None:
    """Make all that is below `directory`, the files and their names, last through a power failure."""
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
    """Rename what lies at `path` to the first free of `run.1`, `run.2` (`trace.1.json`); None when nothing was there."""
    return path.rename(free_name(path)) if path.exists() else None


def free_name(path: Path) -> Path:
    """The first of `run.1`, `run.2` (`trace.1.json`) beside `path` that nothing has."""
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    number = 1
    while (free := path.with_name(f"{stem}.{number}{suffix}")).exists():
        number += 1
    return free


def replace_directory(partial: Path, target: Path) -> None:
    """Give a directory that is complete its name; one that was there before goes, after it and never in part.

    What is in it reaches the disk first: after a power failure nothing of that name is torn.
    """
    sync_tree(partial)
    old = Path(f"{target}.old")
    if old.exists():
        shutil.rmtree(old)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    sync_directory(target.parent)
    if old.exists():
        shutil.rmtree(old)


def require_writable(directory: Path, key: str) -> None:
    """Raise ConfigError, naming the configuration's `key`, unless files can be made in `directory`, or it in a parent.

    It tries, in the nearest directory that is there, and leaves nothing: permissions alone do not tell.
    """
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryDirectory(prefix=".dagrl-", dir=there).cleanup()
    except OSError as error:
        raise ConfigError(f"{key}: cannot write in {there} ({error.strerror}); name another directory") from error


@contextmanager
def locked(file: Path, what: str, advice: str) -> Iterator[None]:
    """Hold a lock on `file` for the block, and have it say by whom; ConfigError when another process has it.

    The lock is the open file's, which no child process inherits, so that it ends with this process however that ends. A
    file system without locks is warned of.
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
