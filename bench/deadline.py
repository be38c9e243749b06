"""The time that a measurement may take: nothing is begun that would not end in it, and what was left out is told."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from dagrl.config import Config

T = TypeVar("T")
TIME_IS_UP = "the time is up"


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
        self.left_out: dict[str, str] = {}  # why, by name

    def allows(self, name: str) -> bool:
        """Whether `name` may begin now; what may not is noted. Call it when what was begun before has ended."""
        now = self._clock()
        if self._begun is not None:
            self._longest = max(self._longest, now - self._begun)
        self._begun = now
        allowed = self._end is None or now + self._longest <= self._end
        if not allowed:
            self.left_out[name] = TIME_IS_UP
        return allowed

    def each(self, items: Iterable[T], name: Callable[[T], str] = str) -> Iterator[T]:
        """Those of `items` that may begin, each when the one before has ended."""
        return (item for item in items if self.allows(name(item)))

    def tell(self) -> None:
        """A line on standard error about what was left out."""
        if self.left_out:
            sys.stderr.write(f"left out, {TIME_IS_UP}: {'; '.join(self.left_out)}\n")


def hurried(config: Config, seconds: float | None) -> Config:
    """The configuration with waits of which several end in `seconds` (None: as they are): a hang is told before the end."""
    if seconds is None:
        return config
    longest = {"start_s": seconds / 2, "compile_s": seconds / 4, "warmup_s": seconds / 3}
    longest |= {"replay_s": seconds / 4, "collective_s": seconds / 8}
    shorter = {name: min(limit, getattr(config.timeouts, name)) for name, limit in longest.items()}
    return config.model_copy(update={"timeouts": config.timeouts.model_copy(update=shorter)})
