"""First replays after warm-up, the slowest of many, and the processor time that processes burn while they wait for one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import ray

from dagrl.bench.variants import DEADLINE_S, Actors, StepSetup, steps
from dagrl.bench.worker import SMALL, payload

PAUSE_S, WAIT_S = 0.25, 3.0
LATER = 200
"""Steps with which a first one is compared."""


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
    taken = [_first_and_later(actors.first(workers)) for _ in range(schedulers)]
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


def _first_and_later(actors: Actors) -> tuple[float, float]:
    value = payload(SMALL)
    with steps(StepSetup("scatter-gather", SMALL, SMALL), actors, ("dagrl_compiled",)) as (step,):
        started = time.perf_counter()
        step.run(value)
        first = time.perf_counter() - started
        later = []
        for _ in range(LATER):
            started = time.perf_counter()
            step.run(value)
            later.append(time.perf_counter() - started)
    return first, float(np.median(later))


@dataclass(frozen=True)
class Waiting:
    """Results of `n` replays one after another, in microseconds, and of replays in which one worker sleeps.

    `cpu_us` is the processor time of the driver and all workers in a replay, `waiting_cpu_s` what they burn together in a
    second in which they wait for the sleeping one.
    """

    p50_us: float
    p99_us: float
    p999_us: float
    ratio: float  # p99 / p50
    cpu_us: float
    waiting_cpu_s: float
    n: int


def waiting(workers: int, actors: Actors, replays: int) -> Waiting:
    """Measures scatter-gather over compiled phases with small inputs and results."""
    used, value = actors.first(workers), payload(SMALL)
    held = used.of["dagrl_compiled"]
    with steps(StepSetup("scatter-gather", SMALL, SMALL), used, ("dagrl_compiled",)) as (step,):
        taken, spent = np.empty(replays), -_cpu_s(held)
        for number in range(replays):
            started = time.perf_counter()
            step.run(value)
            taken[number] = time.perf_counter() - started
        spent += _cpu_s(held)
        burnt = _burnt_while_waiting(held, lambda: step.run(value))
    middle, late, latest = np.percentile(taken * 1e6, [50, 99, 99.9]).round(1).tolist()
    cpu_us = round(1e6 * spent / replays, 1)
    return Waiting(middle, late, latest, round(late / middle, 2), cpu_us, round(burnt, 4), replays)


def _burnt_while_waiting(actors: tuple[object, ...], replay: Callable[[], object]) -> float:
    """Returns the CPU seconds of all processes in a second in which the first worker sleeps."""
    _pause(actors, PAUSE_S)
    try:
        replay()
        started, spent = time.perf_counter(), -_cpu_s(actors)
        while time.perf_counter() - started < WAIT_S:
            replay()
        return (spent + _cpu_s(actors)) / (time.perf_counter() - started)
    finally:
        _pause(actors, 0.0)


def _pause(actors: tuple[object, ...], seconds: float) -> None:
    ray.get(actors[0].set_pause.remote(seconds), timeout=DEADLINE_S)  # type: ignore[attr-defined]


def _cpu_s(actors: tuple[object, ...]) -> float:
    found = ray.get([actor.cpu_s.remote() for actor in actors], timeout=DEADLINE_S)  # type: ignore[attr-defined]
    return time.process_time() + float(sum(found))
