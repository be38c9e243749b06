"""The driver's own work in a GRPO step, whole steps, and refit plans under pytest-benchmark, for `--benchmark-compare`.

pytest dagrl/bench/bench_step.py --benchmark-columns=median,iqr,max,rounds
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dagrl.bench.driver import DriverStep
from dagrl.bench.refit_cases import RefitCase
from dagrl.bench.step_overhead import EXECUTORS, ROLES, groups, layout_of, one_step, scheduler_of
from dagrl.refit import plan_refit
from dagrl.runtime.layout import ParallelLayout

SAMPLES, WORKERS = 1024, 4

PLANS = (
    RefitCase("4B", ParallelLayout(tp=2, pp=2), 4),
    RefitCase("30B", ParallelLayout(dp=4, ep=4), 4),
)


@pytest.fixture(scope="module")
def driver() -> DriverStep:
    return DriverStep(SAMPLES, prompt=120, completion=256)


@pytest.mark.parametrize("part", ["generate", "score", "batch", "keep"])
def test_driver(benchmark: Any, driver: DriverStep, part: str) -> None:
    benchmark.group = f"driver, {SAMPLES} samples of 256 tokens"
    made = driver.generate()
    scored = driver.score(made)
    inputs = {"generate": (), "score": (made,), "batch": (scored,), "keep": (scored, driver.batch(scored))}
    benchmark.pedantic(getattr(driver, part), inputs[part], rounds=10, warmup_rounds=1)


@pytest.fixture(scope="module", params=ROLES)
def workers(request: Any) -> Iterator[tuple[str, Any]]:
    with groups(request.param, layout_of(request.param, WORKERS), idle=True) as made:
        yield request.param, made


@pytest.mark.parametrize("executor", EXECUTORS)
def test_step(benchmark: Any, workers: tuple[str, Any], executor: str) -> None:
    kind, made = workers
    benchmark.group = f"{kind} step, {WORKERS} idle workers"
    with scheduler_of(kind, made, executor) as scheduler:
        benchmark.pedantic(one_step, (kind, scheduler, 0, 1), rounds=20, warmup_rounds=2)


@pytest.mark.parametrize("case", PLANS, ids=lambda case: case.name)
def test_refit_plan(benchmark: Any, case: RefitCase) -> None:
    benchmark.group = "refit plan"
    sources, destinations = case.sources(), case.destinations()
    benchmark.pedantic(
        plan_refit, (sources, destinations), {"dtype": "bfloat16", "aliases": case.aliases}, rounds=5, warmup_rounds=1
    )
