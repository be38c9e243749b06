"""A wall clock of its own for a run, which can jump: libfaketime, preloaded into all of its processes.

Durations come from the monotonic clock, which stays the machine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

LIBRARIES = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib64/faketime/libfaketimeMT.so.1")


class Clock:
    """The offset that a run's processes read from a file."""

    def __init__(self, file: Path, library: Path) -> None:
        self._file, self._library = file, library
        self._set(0)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that give the clock to a command and all that it starts."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
            "NO_FAKE_STAT": "1",
        }

    @contextmanager
    def jumped(self, seconds: int) -> Iterator[None]:
        """Moves the clock for the block, and back at its end."""
        self._set(seconds)
        try:
            yield
        finally:
            self._set(0)

    def _set(self, seconds: int) -> None:
        self._file.write_text(f"{seconds:+d}\n")


def find_library() -> Path | None:
    """Returns libfaketime, if it is installed."""
    return next((path for pattern in LIBRARIES for path in Path("/").glob(pattern[1:])), None)
