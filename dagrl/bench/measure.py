"""Measures variants side by side: they take turns in every round, so a disturbance affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dagrl.bench.report import Row
from dagrl.bench.variants import Step


@dataclass(frozen=True)
class Effort:
    """How long to measure: `rounds` turns, each of at most `samples` steps or `seconds`.

    Each turn starts with `warmup` steps, or a third of `seconds` if that is shorter. Before the first turn the benchmark
    waits up to `settle_s` seconds for the actors' processes to become idle.
    """

    rounds: int = 3
    samples: int = 250
    seconds: float = 0.12
    warmup: int = 20
    settle_s: float = 10.0


FULL = Effort()
QUICK = Effort(rounds=2, samples=40, seconds=0.3, warmup=5, settle_s=1.0)


def timing(samples: Sequence[float]) -> Row:
    """Returns median, 99th percentile and interquartile range of samples in seconds, in microseconds."""
    low, middle, high, late = np.percentile(np.asarray(samples) * 1e6, [25, 50, 75, 99])
    in_us = {"p50_us": middle, "p99_us": late, "spread_us": high - low}
    return {name: round(float(value), 1) for name, value in in_us.items()} | {"n": len(samples)}


def side_by_side(steps: Sequence[Step], inputs: Mapping[str, object], effort: Effort) -> dict[str, Row]:
    """Returns a timing per variant. `inputs` maps each variant to the argument of its step."""
    samples: dict[str, list[float]] = {step.variant: [] for step in steps}
    for _ in range(effort.rounds):
        for step in steps:
            with step.awake():
                samples[step.variant] += _turn(step.run, inputs[step.variant], effort)
    return {variant: timing(taken) for variant, taken in samples.items()}


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


QUIET = 0.1
"""A host counts as quiet when less than this share of all cores' time is in use."""


def wait_for_quiet(longest_s: float, window_s: float = 0.5) -> bool:
    """Waits until the host is quiet for `window_s`, at most `longest_s`. Returns whether it became quiet."""
    until = time.monotonic() + longest_s
    while time.monotonic() < until:
        before = _processor_ticks()
        time.sleep(window_s)
        idle, total = (now - then for now, then in zip(_processor_ticks(), before, strict=True))
        if total and 1 - idle / total < QUIET:
            return True
    return False


def _processor_ticks() -> tuple[int, int]:
    """Returns idle ticks and total ticks of all cores since boot."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return ticks[3] + ticks[4], sum(ticks[:8])
