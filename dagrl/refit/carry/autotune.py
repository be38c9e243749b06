"""Chooses the fastest of several methods by timing them: which one it is depends on the model and the machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Generic, TypeVar

T = TypeVar("T")

TRIALS = 3
"""How often each method is timed."""


class Autotune(Generic[T]):
    """Uses each of `methods` in turn, `TRIALS` times, then only the one with the lowest median time.

    A single method is not timed. The slower methods are dropped.
    """

    def __init__(self, methods: Sequence[T]) -> None:
        self._methods = list(methods)
        self._seconds: list[list[float]] = [[] for _ in methods]

    @property
    def settled(self) -> bool:
        """Whether one method is left."""
        return len(self._methods) == 1

    @contextmanager
    def turn(self) -> Iterator[T]:
        """Yields the method to use now. The block is timed; it does not count if it raises."""
        if self.settled:
            yield self._methods[0]
            return
        number = min(range(len(self._methods)), key=lambda index: len(self._seconds[index]))
        started = time.perf_counter()
        yield self._methods[number]
        self._seconds[number].append(time.perf_counter() - started)
        if all(len(seconds) == TRIALS for seconds in self._seconds):
            best = min(range(len(self._methods)), key=lambda index: median(self._seconds[index]))
            self._methods = [self._methods[best]]
