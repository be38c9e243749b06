"""The time that a measurement may take: nothing is begun that would not end in it, and what was left out is told."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def add_deadline(parser: argparse.ArgumentParser) -> None:
    """The option that all measurements of several ways share."""
    parser.add_argument(
        "--deadline", type=float, metavar="S", help="begin nothing that would not end in S seconds; say what was left out"
    )


class Deadline:
    """`seconds` from now on (None: no limit). What comes next is taken to last as long as the longest so far."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, None if seconds is None else clock() + seconds
        self._begun: float | None = None
        self._longest = 0.0
        self.left_out: list[str] = []

    def allows(self, name: str) -> bool:
        """Whether `name` may begin now; what may not is noted. Call it when what was begun before has ended."""
        now = self._clock()
        if self._begun is not None:
            self._longest = max(self._longest, now - self._begun)
        self._begun = now
        allowed = self._end is None or now + self._longest <= self._end
        if not allowed:
            self.left_out.append(name)
        return allowed

    def each(self, items: Iterable[T], name: Callable[[T], str] = str) -> Iterator[T]:
        """Those of `items` that may begin, each when the one before has ended."""
        return (item for item in items if self.allows(name(item)))

    def tell(self) -> None:
        """A line on standard error about what was left out."""
        if self.left_out:
            sys.stderr.write(f"left out, the time is up: {'; '.join(self.left_out)}\n")
