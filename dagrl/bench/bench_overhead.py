"""The overhead of a step under pytest-benchmark, for `--benchmark-compare`. Names are as in Ray's own benchmarks.

`multiple args` has one shard per worker: `dagrl_compiled` runs one graph per shard, `dagrl_fused` one graph for all.

pytest dagrl/bench/bench_overhead.py --benchmark-columns=median,iqr,max,rounds
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dagrl.bench.overhead import bench_cluster
from dagrl.bench.variants import VARIANTS, Actors, StepSetup, argument, steps
from dagrl.bench.worker import SMALL, payload

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
    with steps(StepSetup(shape, SMALL, SMALL), actors.first(workers), [variant]) as (step,), step.awake():
        benchmark.pedantic(step.run, (argument(shape, variant, workers, payload(SMALL)),), rounds=100, warmup_rounds=10)
