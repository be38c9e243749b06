"""Orchestration overhead: what one step over N workers costs when the workers do nothing.

    dagrl bench overhead --quick                      a minute, on any machine
    dagrl bench overhead --json F --plot F            N = 1 to 64, payloads of 100 B to 16 MiB, five variants side by side

The variants are in `variants.py`; the rows in the JSON file say which, how many workers and hosts, and the bytes of one
input and of one worker's result.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.measure import FULL, QUICK, Effort, side_by_side
from bench.report import Report, Row, as_row, command_line, plot, print_table
from bench.variants import SHAPES, VARIANTS, Actors, argument, steps
from bench.worker import SMALL, payload

KIB, MIB = 1 << 10, 1 << 20
PAYLOADS = (SMALL, 64 * KIB, MIB, 16 * MIB)
RESULTS = (MIB,)
"""Sizes of a worker's result beside the small one, measured with a small input."""
WORKERS = (1, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Plan:
    """What is measured: scatter-gather for all sizes, the other shapes for small inputs."""

    workers: tuple[int, ...] = WORKERS
    payloads: tuple[int, ...] = PAYLOADS
    results: tuple[int, ...] = RESULTS
    shapes: tuple[str, ...] = SHAPES
    variants: tuple[str, ...] = VARIANTS
    hosts: int = 1
    effort: Effort = FULL


QUICK_PLAN = Plan(workers=(1, 2, 4), payloads=(SMALL, MIB), results=(), effort=QUICK)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dagrl bench overhead`."""
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="draw the medians over the number of workers to this file (png, svg)")
    parser.add_argument("--workers", type=_numbers, help="numbers of workers, e.g. 1,8,64")
    parser.add_argument("--payloads", type=_numbers, help="bytes of an input, e.g. 100,1048576")
    parser.add_argument("--shapes", type=lambda text: tuple(text.split(",")), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--hosts", type=int, default=1, help="raylets to spread the workers over, all on this machine")
    parser.add_argument("--quick", action="store_true", help="few workers, few samples")


def run(options: argparse.Namespace) -> None:
    """Measure, print the table, write what was asked for."""
    base = QUICK_PLAN if options.quick else Plan()
    plan = Plan(
        workers=options.workers or base.workers,
        payloads=options.payloads or base.payloads,
        results=base.results,
        shapes=options.shapes or base.shapes,
        hosts=options.hosts,
        effort=base.effort,
    )
    keep = (lambda rows: Report(rows, command_line()).write(options.json)) if options.json else (lambda rows: None)
    report = Report(measure(plan, keep), command_line())
    for shape in plan.shapes:
        print_table(report, shape)
    if options.plot:
        plot(report, options.plot)


def measure(plan: Plan, so_far: Callable[[list[Row]], None] = lambda rows: None) -> list[Row]:
    """All rows of a plan, on a cluster of its own; `so_far` is called whenever there are more."""
    rows: list[Row] = []
    with bench_cluster(plan.hosts) as host_resources:
        actors = Actors.start(max(plan.workers), host_resources)
        for workers in plan.workers:
            for shape in plan.shapes:
                rows += _measure_shape(plan, shape, workers, actors.first(workers))
                so_far(rows)
    return rows


def _measure_shape(plan: Plan, shape: str, workers: int, actors: Actors) -> list[Row]:
    """One shape on some workers, compiled once for each size of results."""
    rows: list[Row] = []
    for result_bytes, payloads in _cases(plan, shape).items():
        actors.set_result(result_bytes)
        with steps(shape, actors, plan.variants, max(payloads), result_bytes) as made:
            for payload_bytes in payloads:
                what = {
                    "workers": workers,
                    "hosts": plan.hosts,
                    "payload_bytes": payload_bytes,
                    "result_bytes": result_bytes,
                }
                value = payload(payload_bytes)
                inputs = {step.variant: argument(shape, step.variant, workers, value) for step in made}
                timings = side_by_side(made, inputs, plan.effort)
                rows += [as_row(timing, variant=variant, shape=shape, **what) for variant, timing in timings.items()]
    return rows


def _cases(plan: Plan, shape: str) -> dict[int, tuple[int, ...]]:
    """For each size of results, the sizes of inputs."""
    if shape == "scatter-gather":
        return {SMALL: plan.payloads, **{size: (SMALL,) for size in plan.results}}
    if shape == "multiple args":
        return {SMALL: tuple(size for size in plan.payloads if size in (SMALL, MIB))}
    return {SMALL: (SMALL,)}


@contextmanager
def bench_cluster(hosts: int = 1) -> Iterator[Sequence[str]]:
    """A Ray cluster of this machine's own, of one or more raylets; gives a custom resource for each, if more than one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if hosts == 1:
        from dagrl.cluster import ray_cluster
        from dagrl.config import ClusterConfig

        with ray_cluster(ClusterConfig(num_cpus=os.cpu_count()), {"OMP_NUM_THREADS": "1"}):
            yield ()
        return
    import ray
    from ray.cluster_utils import Cluster

    names = [f"host{number}" for number in range(hosts)]
    cluster = Cluster()
    for name in names:
        cluster.add_node(num_cpus=2, resources={name: 1}, object_store_memory=2 << 30)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    try:
        yield names
    finally:
        ray.shutdown()
        cluster.shutdown()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
