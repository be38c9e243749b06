"""The slowest of many replays, and the processor time that processes burn while they wait for the slowest worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import ray

from dagrl.bench.variants import DEADLINE_S, Actors, StepSetup, steps
from dagrl.bench.worker import SMALL, payload

PAUSE_S, WAIT_S = 0.25, 3.0


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
