"""Compares the first step after warm-up with the median step, over several fresh schedulers on the same workers."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from dagrl.bench.variants import Actors, StepSetup, steps
from dagrl.bench.worker import SMALL, payload

STEPS = 200


@dataclass(frozen=True)
class FirstSteps:
    """Results over `n` fresh schedulers: median first step and median later step in microseconds, and their ratio."""

    p50_us: float  # first steps
    p99_us: float
    later_us: float
    ratio: float  # median over schedulers of (first step / median of its later steps)
    worst_ratio: float
    n: int


def first_steps(workers: int, actors: Actors, schedulers: int) -> FirstSteps:
    """Compiles and warms up each scheduler, then times one step and 200 more, with small inputs and results."""
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
    with steps(StepSetup("scatter-gather", SMALL, SMALL), actors, ("dagrl_compiled",)) as (step,):
        started = time.perf_counter()
        step.run(value)
        first = time.perf_counter() - started
        later = []
        for _ in range(STEPS):
            started = time.perf_counter()
            step.run(value)
            later.append(time.perf_counter() - started)
    return first, float(np.median(later))
