"""Measuring side by side: rounds in which every variant takes its turn, so that a disturbance touches all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.variants import Step


@dataclass(frozen=True)
class Effort:
    """How long to measure: `rounds` turns of at most `samples` steps or `seconds`, after `warmup` steps or a third of it."""

    rounds: int = 3
    samples: int = 250
    seconds: float = 0.12
    warmup: int = 20


FULL = Effort()
QUICK = Effort(rounds=2, samples=40, seconds=0.3, warmup=5)


@dataclass(frozen=True)
class Timing:
    """Microseconds a step: median, 99th percentile, and the spread (difference of the quartiles) of `n` samples."""

    p50_us: float
    p99_us: float
    spread_us: float
    n: int

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        """From samples in seconds."""
        low, middle, high, late = np.percentile(np.asarray(samples) * 1e6, [25, 50, 75, 99])
        return Timing(round(float(middle), 1), round(float(late), 1), round(float(high - low), 1), len(samples))


def side_by_side(steps: Sequence[Step], inputs: Mapping[str, object], effort: Effort) -> dict[str, Timing]:
    """A timing for each variant; `inputs` is what each is called with."""
    samples: dict[str, list[float]] = {step.variant: [] for step in steps}
    for _ in range(effort.rounds):
        for step in steps:
            with step.awake():
                samples[step.variant] += _turn(step.run, inputs[step.variant], effort)
    return {variant: Timing.of(taken) for variant, taken in samples.items()}


def _turn(run: Callable[[object], object], argument: object, effort: Effort) -> list[float]:
    started = time.perf_counter()
    for _ in range(effort.warmup):
        run(argument)
        if time.perf_counter() - started > effort.seconds / 3:
            break
    taken: list[float] = []
    started = time.perf_counter()
    while len(taken) < effort.samples and (time.perf_counter() - started < effort.seconds or len(taken) < 3):
        before = time.perf_counter()
        run(argument)
        taken.append(time.perf_counter() - before)
    return taken
