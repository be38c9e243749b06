"""Choosing between ways of doing the same thing by doing it: which is faster depends on the model and on the machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Generic, TypeVar

T = TypeVar("T")

TRIALS = 3
"""Times that each way is tried."""


class Fastest(Generic[T]):
    """Uses each of `ways` in turn, `TRIALS` times, and from then on the one whose median time was the least.

    A single way is not timed. Ways that lost are let go of.
    """

    def __init__(self, ways: Sequence[T]) -> None:
        self._ways = list(ways)
        self._taken: list[list[float]] = [[] for _ in ways]

    @property
    def settled(self) -> bool:
        """Whether one way is left."""
        return len(self._ways) == 1

    @contextmanager
    def turn(self) -> Iterator[T]:
        """The way to use now; the block is timed, and counts when it does not raise."""
        if self.settled:
            yield self._ways[0]
            return
        number = min(range(len(self._ways)), key=lambda way: len(self._taken[way]))
        started = time.perf_counter()
        yield self._ways[number]
        self._taken[number].append(time.perf_counter() - started)
        if all(len(taken) == TRIALS for taken in self._taken):
            best = min(range(len(self._ways)), key=lambda way: median(self._taken[way]))
            self._ways = [self._ways[best]]
