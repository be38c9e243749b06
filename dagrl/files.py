"""Small file operations that a run relies on: files that appear whole or not at all, and nothing overwritten unseen."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str) -> None:
    """Write `content` to `path` so that a crash leaves the old file or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def sync_directory(directory: Path) -> None:
    """Make renames inside `directory` last through a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_aside(path: Path) -> Path | None:
    """Rename what lies at `path` to the first free of `run.1`, `run.2` (`trace.1.json`); None when nothing was there."""
    if not path.exists():
        return None
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    number = 1
    while (aside := path.with_name(f"{stem}.{number}{suffix}")).exists():
        number += 1
    path.rename(aside)
    return aside
