"""The overhead of a step under pytest-benchmark, for `--benchmark-compare`. Shapes are as in Ray's own benchmarks.

pytest dagrl/bench/bench_overhead.py --benchmark-columns=median,iqr,max,rounds
"""

from collections.abc import Iterator
from typing import Any

import pytest

from dagrl.bench.overhead import SIDES, Actors, Step, bench_cluster, compiled

STEPS = [("scatter-gather", 1), ("scatter-gather", 4), ("chain", 4), ("multiple args", 4)]


@pytest.fixture(scope="module")
def actors() -> Iterator[Actors]:
    with bench_cluster():
        yield Actors.start(4)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("shape", "workers"), STEPS)
def test_overhead(benchmark: Any, actors: Actors, shape: str, workers: int, side: str) -> None:
    benchmark.group = f"{shape}, n={workers}"
    with compiled([side], Step(shape, workers), actors) as made, made[side].awake():
        benchmark.pedantic(made[side].act, rounds=100, warmup_rounds=10)
