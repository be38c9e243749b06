"""Measures orchestration overhead: what one step over N workers costs when the workers do no work.

    dagrl bench overhead --quick                      a minute, on any machine
    dagrl bench overhead --json F --plot F            N = 1 to 64, payloads of 100 B to 16 MiB, all variants side by side

The variants are described in `dagrl/bench/variants.py`: plain Ray calls, a hand-written Ray compiled graph, and dagrl's
phases with one graph per data-parallel shard, fused, on Ray's engine, or eager. Each row of the JSON file has the variant,
the numbers of workers, shards and hosts, and the bytes of one input and of one worker's result. Below the tables the command
prints what each further shard costs as a graph of its own, compared with the fused form, then first steps after warm-up, and
the 99th percentile of many replays with the processor time that waiting for a slow worker burns (`dagrl/bench/replays.py`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import ray

from dagrl.bench.deadline import BenchDeadline, add_deadline
from dagrl.bench.measure import FULL, QUICK, Effort, side_by_side, wait_for_quiet
from dagrl.bench.replays import first_steps, waiting
from dagrl.bench.report import (
    Row,
    add_outputs,
    check_plot,
    count,
    plot,
    print_replays,
    print_shard_costs,
    print_table,
    report_rows,
    whole_numbers,
)
from dagrl.bench.variants import ARITY, COUNTED, SHAPES, VARIANTS, Actors, Step, StepSetup, argument, steps
from dagrl.bench.worker import SMALL, payload
from dagrl.config import ClusterConfig
from dagrl.run.cluster import PRIORITY, ray_cluster
from dagrl.runtime.edges.memory import copied_bytes

KIB, MIB = 1 << 10, 1 << 20
PAYLOADS = (SMALL, 64 * KIB, MIB, 16 * MIB)
RESULTS = (MIB,)
"""Sizes of a worker's result in addition to the small one, measured with a small input."""
WORKERS = (1, 4, 8, 16, 32, 64)
FIRST_STEP, WAITING, FIRST_STEP_WORKERS = "first step", "waiting", 8
COUNTED_STEPS = 20
"""Steps over which copied bytes are counted."""


@dataclass(frozen=True)
class Plan:
    """What to measure: scatter-gather for all sizes, other shapes for small inputs; `reduce` for all arities and shards."""

    workers: tuple[int, ...] = WORKERS
    payloads: tuple[int, ...] = PAYLOADS
    results: tuple[int, ...] = RESULTS
    shapes: tuple[str, ...] = SHAPES
    variants: tuple[str, ...] = VARIANTS
    arities: tuple[int, ...] = (ARITY,)
    shards: tuple[int, ...] = (1, 2, 4, 8)
    hosts: int = 1
    effort: Effort = FULL
    large_at: tuple[int, ...] | None = None  # numbers of workers for large inputs and results; None: all
    first_steps: int = 10  # fresh schedulers whose first step is measured
    replays: int = 20_000  # replays whose 99th percentile is measured


QUICK_PLAN = Plan(
    workers=(1, 2, 4), payloads=(SMALL, MIB), results=(), shards=(1, 2), effort=QUICK, first_steps=3, replays=2000
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_outputs(parser)
    parser.add_argument("--workers", type=_counts, help="numbers of workers, e.g. 1,8,64")
    parser.add_argument("--payloads", type=whole_numbers, help="bytes of an input, e.g. 100,1048576")
    parser.add_argument("--results", type=whole_numbers, help="bytes of a result in addition to the small one; 0: none")
    parser.add_argument(
        "--large-at", type=whole_numbers, help="workers for inputs over 1 MiB and large results; default: all"
    )
    parser.add_argument("--seconds", type=float, help="length of a variant's turn")
    parser.add_argument("--first-steps", type=int, help="fresh schedulers whose first step is measured; 0: none")
    parser.add_argument("--replays", type=int, help="replays whose 99th percentile is measured; 0: none")
    parser.add_argument("--shapes", type=_names_of(SHAPES), help=f"any of {', '.join(SHAPES)}")
    parser.add_argument("--variants", type=_names_of(VARIANTS), help=f"any of {', '.join(VARIANTS)}")
    parser.add_argument("--arities", type=whole_numbers, default=(ARITY,), help="arities of shape reduce, e.g. 2,4,8,16")
    parser.add_argument("--shards", type=_counts, help="numbers of shards of shape reduce that divide its workers, e.g. 1,4")
    parser.add_argument("--hosts", type=count, default=1, help="raylets to spread the workers over, all on this machine")
    parser.add_argument("--quick", action="store_true", help="few workers, few samples")
    add_deadline(parser)


def run(options: argparse.Namespace) -> None:
    if options.plot:
        check_plot(options.plot)
    base = QUICK_PLAN if options.quick else Plan()
    names = {field.name for field in fields(Plan)}
    plan = replace(base, **{name: given for name, given in vars(options).items() if name in names and given is not None})
    if options.seconds:
        plan = replace(plan, effort=replace(base.effort, seconds=options.seconds))
    deadline = BenchDeadline(options.deadline)

    def show(rows: Sequence[Row]) -> None:
        for shape in plan.shapes:
            print_table(rows, shape)
        print_shard_costs(rows)
        print_replays(rows)

    report_rows(options, measure(plan, deadline), show, plot, deadline=deadline)


def measure(plan: Plan, deadline: BenchDeadline) -> Iterator[list[Row]]:
    """Measures what the deadline allows of the plan, on a cluster of its own. Yields all rows so far."""
    rows: list[Row] = []
    with bench_cluster(plan.hosts) as host_resources:
        actors = Actors.start(max(plan.workers), host_resources, plan.variants)
        wait_for_quiet(plan.effort.settle_s)
        nearest = min(plan.workers, key=lambda workers: abs(workers - FIRST_STEP_WORKERS))
        for workers in plan.workers:
            for case in deadline.each(_cases(plan, workers), partial(_name_of_case, workers)):
                rows += _measure_case(plan, actors.first(workers), *case)
                yield rows
            if workers == nearest and "dagrl_compiled" in plan.variants:
                counts = {FIRST_STEP: plan.first_steps, WAITING: plan.replays}
                for shape in deadline.each([shape for shape, count in counts.items() if count]):
                    rows.append(_with_small(plan, workers, actors, shape))
                    yield rows


Case = tuple[str, int, int]
"""Shape, arity, shards."""


def _cases(plan: Plan, workers: int) -> list[Case]:
    """Returns each shape, `reduce` with each arity and each number of shards that divides the workers."""
    cases: list[Case] = []
    for shape in plan.shapes:
        if shape == "reduce":
            cases += [(shape, arity, shards) for arity in plan.arities for shards in plan.shards if workers % shards == 0]
        else:
            cases.append((shape, ARITY, workers if shape == "multiple args" else 1))
    return cases


def _measure_case(plan: Plan, actors: Actors, shape: str, arity: int, shards: int) -> list[Row]:
    """Measures one case, compiled once per size of results."""
    rows: list[Row] = []
    workers = actors.count
    variants = [variant for variant in plan.variants if shards > 1 or variant != "dagrl_fused"]  # one shard: the same graph
    own = {"arity": arity} if shape == "reduce" else {}
    for result_bytes, payloads in _sizes(plan, shape, workers).items():
        actors.set_result(result_bytes)
        with steps(StepSetup(shape, max(payloads), result_bytes, arity, shards), actors, variants) as made:
            for payload_bytes in payloads:
                what = {"workers": workers, "shards": shards, "hosts": plan.hosts}
                what |= {"payload_bytes": payload_bytes, "result_bytes": result_bytes, **own}
                value = payload(payload_bytes)
                inputs = {step.variant: argument(shape, step.variant, workers, value) for step in made}
                timings = side_by_side(made, inputs, plan.effort)
                for step in made:
                    row = {"variant": step.variant, "shape": shape, **what, **timings[step.variant]}
                    if step.variant in COUNTED:
                        row["copied_bytes"] = _counted(step, inputs[step.variant], actors)
                    rows.append(row)
    return rows


def _counted(step: Step, value: Any, actors: Actors) -> int:
    """Returns the bytes that a step copies into edges and out of them, by the counters of the driver and all workers."""

    def total() -> int:
        return copied_bytes() + int(sum(ray.get([actor.copied.remote() for actor in actors.of[step.variant]])))

    before = total()
    with step.awake():
        for _ in range(COUNTED_STEPS):
            step.run(value)
    return round((total() - before) / COUNTED_STEPS)


def _with_small(plan: Plan, workers: int, actors: Actors, shape: str) -> Row:
    """Measures first steps or many replays, with small inputs and results."""
    actors.set_result(SMALL)
    case = {"variant": "dagrl_compiled", "shape": shape, "workers": workers, "hosts": plan.hosts}
    found = first_steps(workers, actors, plan.first_steps) if shape == FIRST_STEP else waiting(workers, actors, plan.replays)
    return {**case, "payload_bytes": SMALL, "result_bytes": SMALL, **found}


def _sizes(plan: Plan, shape: str, workers: int) -> dict[int, tuple[int, ...]]:
    """Returns the sizes of inputs for each size of results."""
    if shape in ("chain", "reduce"):
        return {SMALL: (SMALL,)}
    if shape == "multiple args":
        return {SMALL: tuple(size for size in plan.payloads if size in (SMALL, MIB))}
    large = plan.large_at is None or workers in plan.large_at
    cases = {SMALL: tuple(size for size in plan.payloads if large or size <= MIB)}
    return cases | ({size: (SMALL,) for size in plan.results if size} if large else {})


@contextmanager
def bench_cluster(hosts: int = 1) -> Iterator[Sequence[str]]:
    """Starts a Ray cluster on this machine, of one or more raylets; yields a custom resource per raylet if several.

    Workers get the process priority of GPU runs.
    """
    os.environ.update(PRIORITY)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if hosts == 1:
        with ray_cluster(ClusterConfig(num_cpus=os.cpu_count()), {"OMP_NUM_THREADS": "1"}, store_bytes=_store()):
            yield ()
        return
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


def _store() -> int:
    """Returns the size of Ray's object store: room for many steps of plain calls, which put a copy of the input per call."""
    return min(16 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)


def _name_of_case(workers: int, case: Case) -> str:
    shape, arity, shards = case
    return f"{shape} of {workers} workers" + (f", arity {arity}, {shards} shards" if shape == "reduce" else "")


def _names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Returns the parser of an option that takes names from `known`."""

    def names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"found {', '.join(unknown)}; choose from {', '.join(known)}")
        return found

    return names


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(count, text.split(",")))
