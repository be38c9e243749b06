"""Time limit of a benchmark: skips whatever would not finish in time and reports it."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from dagrl.config import Config

T = TypeVar("T")
TIME_IS_UP = "the time is up"


def add_deadline(parser: argparse.ArgumentParser, default: float | None = None) -> None:
    """Adds `--deadline` to a benchmark's options."""
    text = "skip what would not finish within S seconds, and report it"
    parser.add_argument("--deadline", type=float, metavar="S", default=default, help=text)


class BenchDeadline:
    """Allows work for `seconds` from now on (None: no limit). The next item is assumed to take as long as the longest so
    far."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, None if seconds is None else clock() + seconds
        self._begun: float | None = None
        self._longest = 0.0
        self.left_out: dict[str, str] = {}  # reason by name

    def allows(self, name: str) -> bool:
        """Returns whether `name` may start now, and records it as left out if not. Call it when the previous item has
        finished."""
        now = self._clock()
        if self._begun is not None:
            self._longest = max(self._longest, now - self._begun)
        self._begun = now
        allowed = self._end is None or now + self._longest <= self._end
        if not allowed:
            self.left_out[name] = TIME_IS_UP
        return allowed

    def left(self) -> float:
        """Returns the seconds that are left; infinite without a limit."""
        return math.inf if self._end is None else self._end - self._clock()

    def each(self, items: Iterable[T], name: Callable[[T], str] = str) -> Iterator[T]:
        """Yields the `items` that may start, each after the previous one has finished."""
        return (item for item in items if self.allows(name(item)))

    def tell(self) -> None:
        """Writes a line about left-out items to standard error."""
        if self.left_out:
            sys.stderr.write(f"{by_reason(self.left_out)}\n")


def by_reason(left_out: Mapping[str, str]) -> str:
    """Returns what was left out, after each reason: `left out, the time is up: a, b; left out, needs 4 GPUs: c`."""
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"left out, {reason}: {', '.join(some)}" for reason, some in names.items())


def hurried(config: Config, seconds: float | None) -> Config:
    """Shortens the configuration's timeouts so that several fit into `seconds` (None: unchanged) and a hang is reported in
    time."""
    if seconds is None:
        return config
    longest = {"start_s": seconds / 2, "compile_s": seconds / 4, "warmup_s": seconds / 3}
    longest |= {"replay_s": seconds / 4, "collective_s": seconds / 8}
    shorter = {name: min(limit, getattr(config.timeouts, name)) for name, limit in longest.items()}
    return config.model_copy(update={"timeouts": config.timeouts.model_copy(update=shorter)})
