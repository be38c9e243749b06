"""The overhead of a step under pytest-benchmark, for `--benchmark-compare` and the like; names as in Ray's own benchmarks.

pytest bench/bench_overhead.py --benchmark-columns=median,iqr,max,rounds
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.overhead import bench_cluster
from bench.variants import VARIANTS, Actors, argument, steps
from bench.worker import SMALL, payload

NAMES = {
    "single-actor": ("scatter-gather", 1),
    "scatter-gather, n=4": ("scatter-gather", 4),
    "chain, n=4": ("chain", 4),
    "multiple args, n=4": ("multiple args", 4),
}


@pytest.fixture(scope="module")
def actors() -> Iterator[Actors]:
    with bench_cluster():
        yield Actors.start(4)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_overhead(benchmark: Any, actors: Actors, name: str, variant: str) -> None:
    shape, workers = NAMES[name]
    benchmark.group = f"{name}, {SMALL} B"
    with steps(shape, actors.first(workers), [variant], SMALL, SMALL) as (step,), step.awake():
        benchmark.pedantic(step.run, (argument(shape, variant, workers, payload(SMALL)),), rounds=100, warmup_rounds=10)
