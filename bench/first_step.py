"""The first step after a warm-up, against the median step: fresh schedulers, one after the other, on the same workers."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from bench.variants import Actors, steps
from bench.worker import SMALL, payload

STEPS = 200


@dataclass(frozen=True)
class FirstSteps:
    """Over `n` fresh schedulers: median first step and median of later ones in microseconds, and the ratio of the two."""

    p50_us: float  # of the first steps
    p99_us: float
    later_us: float
    ratio: float  # median over the schedulers of first step to that scheduler's median step
    worst_ratio: float
    n: int


def first_steps(workers: int, actors: Actors, schedulers: int) -> FirstSteps:
    """Compile and warm up, take one step and then 200 more; small inputs and results."""
    taken = [_one(actors.first(workers)) for _ in range(schedulers)]
    first, later = np.array(taken).T * 1e6
    ratios = first / later
    return FirstSteps(
        p50_us=round(float(np.median(first)), 1),
        p99_us=round(float(np.percentile(first, 99)), 1),
        later_us=round(float(np.median(later)), 1),
        ratio=round(float(np.median(ratios)), 3),
        worst_ratio=round(float(ratios.max()), 3),
        n=schedulers,
    )


def _one(actors: Actors) -> tuple[float, float]:
    value = payload(SMALL)
    with steps("scatter-gather", actors, ("dagrl_compiled",), SMALL, SMALL) as (step,):
        started = time.perf_counter()
        step.run(value)
        first = time.perf_counter() - started
        later = []
        for _ in range(STEPS):
            started = time.perf_counter()
            step.run(value)
            later.append(time.perf_counter() - started)
    return first, float(np.median(later))
