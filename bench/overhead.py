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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.copied import computed, counted
from bench.deadline import Deadline, add_deadline
from bench.first_step import first_steps
from bench.measure import FULL, QUICK, Effort, side_by_side, wait_for_quiet
from bench.report import Report, Row, as_row, check_plot, command_line, plot, print_first_steps, print_table
from bench.variants import ARITY, SHAPES, VARIANTS, Actors, Step, argument, steps
from bench.worker import SMALL, payload

KIB, MIB = 1 << 10, 1 << 20
PAYLOADS = (SMALL, 64 * KIB, MIB, 16 * MIB)
RESULTS = (MIB,)
"""Sizes of a worker's result beside the small one, measured with a small input."""
WORKERS = (1, 4, 8, 16, 32, 64)
FIRST_STEP, FIRST_STEP_WORKERS = "first step", 8


@dataclass(frozen=True)
class Plan:
    """What is measured: scatter-gather for all sizes, the other shapes for small inputs; `reduce` with each of `arities`."""

    workers: tuple[int, ...] = WORKERS
    payloads: tuple[int, ...] = PAYLOADS
    results: tuple[int, ...] = RESULTS
    shapes: tuple[str, ...] = SHAPES
    variants: tuple[str, ...] = VARIANTS
    arities: tuple[int, ...] = (ARITY,)
    hosts: int = 1
    effort: Effort = FULL
    large_at: tuple[int, ...] | None = None  # numbers of workers with large inputs and results; None: all
    first_steps: int = 10  # fresh schedulers whose first step is measured; none: not measured


QUICK_PLAN = Plan(workers=(1, 2, 4), payloads=(SMALL, MIB), results=(), effort=QUICK, first_steps=3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dagrl bench overhead`."""
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="draw the medians over the number of workers to this file (png, svg)")
    parser.add_argument("--workers", type=_counts, help="numbers of workers, e.g. 1,8,64")
    parser.add_argument("--payloads", type=_numbers, help="bytes of an input, e.g. 100,1048576")
    parser.add_argument("--results", type=_numbers, help="bytes of a result beside the small one, e.g. 1048576; 0: none")
    parser.add_argument("--large-at", type=_numbers, help="workers for inputs over 1 MiB and large results; default: all")
    parser.add_argument("--seconds", type=float, help="how long a variant is measured in each of its turns")
    parser.add_argument("--first-steps", type=int, help="fresh schedulers whose first step is measured; 0: none")
    parser.add_argument("--shapes", type=_names_of(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--variants", type=_names_of(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--arities", type=_numbers, default=(ARITY,), help="of the trees of shape reduce, e.g. 2,4,8,16")
    parser.add_argument("--hosts", type=int, default=1, help="raylets to spread the workers over, all on this machine")
    parser.add_argument("--quick", action="store_true", help="few workers, few samples")
    add_deadline(parser)


def run(options: argparse.Namespace) -> None:
    """Measure, print the table, write what was asked for."""
    if options.plot:
        check_plot(options.plot)
    base = QUICK_PLAN if options.quick else Plan()
    plan = Plan(
        workers=options.workers or base.workers,
        payloads=options.payloads or base.payloads,
        results=base.results if options.results is None else options.results,
        shapes=options.shapes or base.shapes,
        variants=options.variants or base.variants,
        arities=options.arities,
        hosts=options.hosts,
        effort=replace(base.effort, seconds=options.seconds) if options.seconds else base.effort,
        large_at=options.large_at,
        first_steps=base.first_steps if options.first_steps is None else options.first_steps,
    )
    deadline = Deadline(options.deadline)

    def keep(rows: list[Row]) -> Report:
        found = Report(rows, command_line(), left_out=deadline.left_out)
        if options.json:
            found.write(options.json)
        return found

    report = keep(measure(plan, deadline, keep))
    for shape in plan.shapes:
        print_table(report, shape)
    print_first_steps(report)
    deadline.tell()
    if options.plot and report.rows:
        plot(report, options.plot)


def measure(plan: Plan, deadline: Deadline, so_far: Callable[[list[Row]], object] = lambda rows: None) -> list[Row]:
    """All rows of a plan that the deadline allows, on a cluster of its own; `so_far` is called whenever there are more."""
    rows: list[Row] = []
    with bench_cluster(plan.hosts) as host_resources:
        actors = Actors.start(max(plan.workers), host_resources)
        wait_for_quiet(plan.effort.settle_s)
        for workers in plan.workers:
            for shape, arity in deadline.each(_shapes(plan), partial(_name_of_case, workers)):
                rows += _measure_shape(plan, shape, workers, actors.first(workers), arity)
                so_far(rows)
            first = plan.first_steps and workers == _nearest(plan.workers, FIRST_STEP_WORKERS)
            if first and deadline.allows("first steps"):
                rows.append(_first_steps(plan, workers, actors))
                so_far(rows)
    return rows


def _shapes(plan: Plan) -> list[tuple[str, int]]:
    """Each shape and arity."""
    return [(shape, arity) for shape in plan.shapes for arity in (plan.arities if shape == "reduce" else (ARITY,))]


def _measure_shape(plan: Plan, shape: str, workers: int, actors: Actors, arity: int) -> list[Row]:
    """One shape on some workers, compiled once for each size of results."""
    rows: list[Row] = []
    for result_bytes, payloads in _cases(plan, shape, workers).items():
        actors.set_result(result_bytes)
        with steps(shape, actors, plan.variants, max(payloads), result_bytes, arity) as made:
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
                for step in made:
                    row = as_row(timings[step.variant], variant=step.variant, shape=shape, **what)
                    own = {"arity": arity} if shape == "reduce" else {}
                    copied = _copied(step, shape, actors, plan.hosts, inputs[step.variant], value, result_bytes)
                    rows.append({**row, **own, **copied})
    return rows


def _copied(step: Step, shape: str, actors: Actors, hosts: int, given: Any, value: Any, result_bytes: int) -> dict[str, Any]:
    """The bytes that a step copies, and how that is known; nothing where it is not."""
    if step.variant == "dagrl_compiled":
        return {"copied_bytes": counted(step, given, actors), "copied_by": "counted"}
    if step.variant == "dagrl_eager" and shape == "multiple args":
        value = given  # one batch for all shards
    known = computed(step.variant, shape, len(actors.flat), value, payload(result_bytes)) if hosts == 1 else None
    return {} if known is None else {"copied_bytes": known, "copied_by": "computed"}


def _first_steps(plan: Plan, workers: int, actors: Actors) -> Row:
    actors.set_result(SMALL)
    sizes = {"payload_bytes": SMALL, "result_bytes": SMALL}
    found = first_steps(workers, actors, plan.first_steps)
    return as_row(found, variant="dagrl_compiled", shape=FIRST_STEP, workers=workers, hosts=plan.hosts, **sizes)


def _cases(plan: Plan, shape: str, workers: int) -> dict[int, tuple[int, ...]]:
    """For each size of results, the sizes of inputs."""
    if shape in ("chain", "reduce"):
        return {SMALL: (SMALL,)}
    if shape == "multiple args":
        return {SMALL: tuple(size for size in plan.payloads if size in (SMALL, MIB))}
    large = plan.large_at is None or workers in plan.large_at
    cases = {SMALL: tuple(size for size in plan.payloads if large or size <= MIB)}
    return cases | ({size: (SMALL,) for size in plan.results if size} if large else {})


@contextmanager
def bench_cluster(hosts: int = 1) -> Iterator[Sequence[str]]:
    """A Ray cluster of this machine's own, of one or more raylets; gives a custom resource for each, if more than one.

    Workers have the priority that they have in runs with GPUs.
    """
    from dagrl.cluster import PRIORITY

    os.environ.update(PRIORITY)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if hosts == 1:
        from dagrl.cluster import ray_cluster
        from dagrl.config import ClusterConfig

        with ray_cluster(ClusterConfig(num_cpus=os.cpu_count(), object_store_memory=_store()), {"OMP_NUM_THREADS": "1"}):
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


def _store() -> int:
    """Bytes of Ray's object store: room for what plain calls put there in many steps, a copy of the input for each call."""
    return min(16 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)


def _name_of_case(workers: int, case: tuple[str, int]) -> str:
    shape, arity = case
    return f"{shape} of {workers} workers" + (f", arity {arity}" if shape == "reduce" else "")


def _nearest(numbers: Sequence[int], wanted: int) -> int:
    return min(numbers, key=lambda number: abs(number - wanted))


def _names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option that takes some of `known`."""

    def names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
        return found

    return names


def _counts(text: str) -> tuple[int, ...]:
    if min(numbers := _numbers(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: numbers of workers are 1 or more")
    return numbers


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 1,8,64") from error
