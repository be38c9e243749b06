"""First replays after warm-up, the slowest of many, and the processor time that processes burn while they wait for one."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import ray

from dagrl.bench.report import Row
from dagrl.bench.variants import DEADLINE_S, Actors, Step, StepSetup, steps
from dagrl.bench.worker import SMALL, payload

PAUSE_S, WAIT_S = 0.25, 3.0
LATER = 200
"""Steps with which a first one is compared."""


def first_steps(workers: int, actors: Actors, schedulers: int) -> Row:
    """Compiles and warms up each scheduler, then times one step and 200 more, with small inputs and results.

    Returns the median and 99th percentile of the first steps and the median of the later ones in microseconds, and the
    median and the worst ratio of a scheduler's first step to its later ones.
    """
    taken = [_first_and_later(actors.first(workers)) for _ in range(schedulers)]
    first, later = np.array(taken).T * 1e6
    ratios = first / later
    return {
        "p50_us": round(float(np.median(first)), 1),
        "p99_us": round(float(np.percentile(first, 99)), 1),
        "later_us": round(float(np.median(later)), 1),
        "ratio": round(float(np.median(ratios)), 3),
        "worst_ratio": round(float(ratios.max()), 3),
        "n": schedulers,
    }


def _first_and_later(actors: Actors) -> tuple[float, float]:
    value = payload(SMALL)
    with steps(StepSetup("scatter-gather", SMALL, SMALL), actors, ("dagrl_compiled",)) as (step,):
        first, *later = (_seconds(step, value) for _ in range(1 + LATER))
    return first, float(np.median(later))


def _seconds(step: Step, value: object) -> float:
    started = time.perf_counter()
    step.run(value)
    return time.perf_counter() - started


def waiting(workers: int, actors: Actors, replays: int) -> Row:
    """Measures scatter-gather over compiled phases with small inputs and results.

    Returns percentiles of the replays in microseconds, `ratio` (p99 / p50), the processor time of the driver and all workers
    in a replay (`cpu_us`), and what they burn together in a second in which they wait for a sleeping worker
    (`waiting_cpu_s`).
    """
    used, value = actors.first(workers), payload(SMALL)
    held = used.of["dagrl_compiled"]
    with steps(StepSetup("scatter-gather", SMALL, SMALL), used, ("dagrl_compiled",)) as (step,):
        before = _cpu_s(held)
        taken = np.array([_seconds(step, value) for _ in range(replays)])
        spent = _cpu_s(held) - before
        burnt = _burnt_while_waiting(held, lambda: step.run(value))
    middle, late, latest = np.percentile(taken * 1e6, [50, 99, 99.9]).round(1).tolist()
    return {
        "p50_us": middle,
        "p99_us": late,
        "p999_us": latest,
        "ratio": round(late / middle, 2),
        "cpu_us": round(1e6 * spent / replays, 1),
        "waiting_cpu_s": round(burnt, 4),
        "n": replays,
    }


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
