"""The variants of one step on N workers that the overhead benchmark compares, and the shapes of a step.

Variants:
- `ray_calls`, `ray_calls_put`: plain actor calls; the input as an argument, or put into the object store once.
- `ray_flat_graph`: a Ray compiled graph written by hand.
- `dagrl_compiled`: a phase with one compiled graph per data-parallel shard, the default.
- `dagrl_fused`: the same with `fuse_shards`, one graph for all shards of a host.
- `dagrl_ray_engine`: a phase with `engine: ray`, Ray's own loop and channels.
- `dagrl_eager`: a phase under the eager executor.

Shapes have the names of Ray's own microbenchmarks (`ray/_private/ray_experimental_perf.py`): `scatter-gather` (one input to
all, one result from each; `single-actor` with one worker), `chain` (through all workers in turn), `multiple args` (one input
per worker; each worker is a shard). `reduce` is the shape of dagrl's own phases: one input to all workers of each shard, and
results joined on the workers in a tree. With Ray's variants the driver reads and joins them.

Variants with compiled graphs have their own actors; the others share one set. Ray's graphs poll while they wait, so their
actors are stopped (SIGSTOP) while another variant runs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.dag import DAGContext, InputNode, MultiOutputNode

from dagrl.bench.worker import SMALL, BenchWorker
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.options import SchedulerOptions
from dagrl.runtime.phase import Input, Phase, Shard, Value, phase
from dagrl.runtime.schedule import Scheduler
from dagrl.runtime.shapes import Batch, Bucket, Field
from dagrl.runtime.worker_group import WorkerGroup

DAGRL_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "dagrl_compiled": {},
    "dagrl_fused": {"fuse_shards": True},
    "dagrl_ray_engine": {"engine": "ray"},
    "dagrl_eager": {"executor": "eager"},
}
"""Scheduler options of dagrl's variants."""

VARIANTS = ("ray_calls", "ray_calls_put", "ray_flat_graph", *DAGRL_OPTIONS)
COUNTED = ("dagrl_compiled", "dagrl_fused")
"""Variants whose copied bytes are counted."""

POLLING = ("ray_flat_graph", "dagrl_ray_engine")
"""Variants whose actors poll while they wait."""

SHARED_ACTORS = ("ray_calls", "ray_calls_put", "dagrl_eager")
"""Variants without compiled graphs; they share one set of actors."""

SHAPES = ("scatter-gather", "chain", "multiple args", "reduce")
ARITY = SchedulerOptions().arity

IN_FLIGHT = 2
ENVELOPE = 1 << 16
DEADLINE_S = 120


@phase
def scatter_gather(train: Shard, value: Input) -> Value:
    """Sends the input to every worker and every result to the driver."""
    return train.map("step", value)


@phase
def chain(train: Shard, value: Input) -> Value:
    """Passes the input through all workers, one after another."""
    passed = train[0].map("echo", value)
    for worker in train.workers[1:]:
        passed = train[worker].map("echo", passed)
    return passed


@phase(inputs={"tokens": Field("uint8"), "lengths": Field("int64", "row")})
def multiple_args(train: Shard, batch: Input) -> Value:
    """Sends each shard, of one worker, its own rows."""
    return train.map("step", batch)


@phase
def reduced(train: Shard, value: Input) -> Value:
    """Sends the input to every worker and joins the results on the workers."""
    return train.reduce("merge", train.map("step", value))


PHASES: dict[str, Phase] = {
    "scatter-gather": scatter_gather,
    "chain": chain,
    "multiple args": multiple_args,
    "reduce": reduced,
}


@dataclass(frozen=True)
class Step:
    """One variant, ready to run: `run(value)` runs a step and waits for its results."""

    variant: str
    run: Callable[[Any], object]
    pids: tuple[int, ...] = ()  # processes to stop while other variants run

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Lets the variant's processes run inside the block only."""
        _signal(self.pids, signal.SIGCONT)
        try:
            yield
        finally:
            _signal(self.pids, signal.SIGSTOP)


@dataclass(frozen=True)
class Actors:
    """The actors of each variant, and the process ids of those that poll."""

    of: Mapping[str, tuple[Any, ...]]
    pids: Mapping[str, tuple[int, ...]]

    @staticmethod
    def start(count: int, host_resources: Sequence[str] = (), variants: Sequence[str] = VARIANTS) -> Actors:
        """Starts `count` actors per set, spread over the hosts in equal runs; only the sets that `variants` need."""
        hosts = [host_resources[number * len(host_resources) // count :][:1] for number in range(count)]
        sets = {"shared" if variant in SHARED_ACTORS else variant for variant in variants}
        started = {name: tuple(_start_actor(host) for host in hosts) for name in sorted(sets)}
        pids = {name: tuple(ray.get([a.pid.remote() for a in found], timeout=DEADLINE_S)) for name, found in started.items()}
        of = {variant: started["shared" if variant in SHARED_ACTORS else variant] for variant in variants}
        return Actors(of, {variant: pids[variant] for variant in variants if variant in POLLING})

    @property
    def count(self) -> int:
        """Actors per variant."""
        return len(next(iter(self.of.values())))

    def first(self, count: int) -> Actors:
        """Returns fewer actors, spread over the hosts like all of them."""
        keep = [number * self.count // count for number in range(count)]
        of = {variant: tuple(found[number] for number in keep) for variant, found in self.of.items()}
        return Actors(of, {variant: tuple(found[number] for number in keep) for variant, found in self.pids.items()})

    def set_result(self, size: int) -> None:
        """Makes every worker answer with `size` bytes; not while a graph is compiled on it."""
        every = {actor for found in self.of.values() for actor in found}
        ray.get([actor.set_result.remote(size) for actor in every], timeout=DEADLINE_S)


def _start_actor(host: Sequence[str]) -> Any:
    actor_class = ray.remote(num_cpus=0, max_restarts=0)(BenchWorker)
    return actor_class.options(resources={name: 0.001 for name in host}).remote()


@dataclass(frozen=True)
class StepSetup:
    """What a variant is compiled for: the largest input and result, dagrl's arity, and the number of shards."""

    shape: str
    payload_bytes: int
    result_bytes: int
    arity: int = ARITY
    shards: int = 1


@contextmanager
def steps(setup: StepSetup, actors: Actors, variants: Sequence[str]) -> Iterator[list[Step]]:
    """Yields the variants, ready to run; all are compiled on the same workers' hosts."""
    makers = {"ray_calls": _calls, "ray_calls_put": _calls_put, "ray_flat_graph": _flat_graph}
    makers |= {variant: partial(_dagrl, options) for variant, options in DAGRL_OPTIONS.items()}
    closers: list[Callable[[], None]] = []
    made = []
    try:
        for variant in variants:
            run, close = makers[variant](setup, actors.of[variant])
            step = Step(variant, run, actors.pids.get(variant, ()))
            closers.append(partial(_close, step, close))
            made.append(step)
            _signal(step.pids, signal.SIGSTOP)
        yield made
    finally:
        for close in reversed(closers):
            close()


def _close(step: Step, close: Callable[[], None]) -> None:
    _signal(step.pids, signal.SIGCONT)
    close()


Runner = tuple[Callable[[Any], object], Callable[[], None]]
"""A function that runs one step, and one that releases what it compiled."""


def _calls(setup: StepSetup, actors: Sequence[Any]) -> Runner:
    if setup.shape == "chain":
        return (lambda value: ray.get(_pass_on(actors, value))), _nothing
    if setup.shape == "multiple args":
        return (lambda rows: ray.get([a.step.remote(row) for a, row in zip(actors, rows, strict=True)])), _nothing
    if setup.shape == "reduce":
        return (lambda value: _merge(ray.get([actor.step.remote(value) for actor in actors]))), _nothing
    return (lambda value: ray.get([actor.step.remote(value) for actor in actors])), _nothing


def _merge(parts: list[object]) -> object:
    """Joins results on the driver."""
    return BenchWorker().merge(parts)


def _calls_put(setup: StepSetup, actors: Sequence[Any]) -> Runner:
    run, close = _calls(setup, actors)
    if setup.shape == "multiple args":
        return (lambda rows: run([ray.put(row) for row in rows])), close
    return (lambda value: run(ray.put(value))), close


def _pass_on(actors: Sequence[Any], value: Any) -> Any:
    for actor in actors:
        value = actor.echo.remote(value)
    return value


def _flat_graph(setup: StepSetup, actors: Sequence[Any]) -> Runner:
    """Compiles the graph a user would write by hand, with buffers that never grow, in the driver and in the workers."""
    context = DAGContext.get_current()
    before = context.buffer_size_bytes
    context.buffer_size_bytes = setup.payload_bytes + ENVELOPE
    context.get_timeout = context.submit_timeout = DEADLINE_S
    worker_bytes = (setup.payload_bytes if setup.shape == "chain" else setup.result_bytes) + ENVELOPE
    ray.get([actor.__ray_call__.remote(_set_buffer_bytes, worker_bytes) for actor in actors], timeout=DEADLINE_S)
    with InputNode() as start:
        if setup.shape == "chain":
            node: Any = start
            for actor in actors:
                node = actor.echo.bind(node)
        else:
            own = setup.shape == "multiple args"
            node = MultiOutputNode([a.step.bind(start[i] if own else start) for i, a in enumerate(actors)])
    graph = node.experimental_compile(_max_inflight_executions=IN_FLIGHT)
    context.buffer_size_bytes = before
    if setup.shape == "multiple args":
        return (lambda rows: ray.get(graph.execute(*rows))), graph.teardown
    if setup.shape == "reduce":
        return (lambda value: _merge(ray.get(graph.execute(value)))), graph.teardown
    return (lambda value: ray.get(graph.execute(value))), graph.teardown


def _dagrl(options: Mapping[str, Any], setup: StepSetup, actors: Sequence[Any]) -> Runner:
    shape, count = setup.shape, len(actors)
    shards = count if shape == "multiple args" else setup.shards
    group = WorkerGroup.from_actors(list(actors), ParallelLayout(dp=shards, tp=count // shards))
    # scatter-gather joins small results on the workers into one list, which must fit
    sizes = {"chain": setup.payload_bytes, "scatter-gather": setup.result_bytes * count}
    common: dict[str, Any] = {"fallback": "error", "max_in_flight": IN_FLIGHT, "arity": setup.arity}
    common |= {"compile_s": DEADLINE_S, "replay_s": DEADLINE_S}
    result_bytes = sizes.get(shape, setup.result_bytes) + ENVELOPE
    scheduler = Scheduler([group], SchedulerOptions(**common, **options, result_bytes=result_bytes))
    step = PHASES[shape]
    if shape == "multiple args":
        scheduler.add(step, buckets=[Bucket(1, width) for width in sorted({SMALL, setup.payload_bytes})])
    else:
        scheduler.add(step, warmup_value=b"x", input_bytes=setup.payload_bytes + ENVELOPE)
    scheduler.compile()
    scheduler.warmup()
    return (lambda value: scheduler.replay(step, value).result()), scheduler.close


def argument(shape: str, variant: str, workers: int, value: Any) -> Any:
    """Returns the argument with which a step of this shape and variant brings `value` to every worker."""
    if shape != "multiple args":
        return value
    if not variant.startswith("dagrl"):
        return [value] * workers
    row = np.frombuffer(value, dtype=np.uint8)
    tokens = np.tile(row, (workers, 1))
    return Batch({"tokens": tokens, "lengths": np.full(workers, tokens.shape[1])})


def _set_buffer_bytes(worker: object, size: int) -> None:
    DAGContext.get_current().buffer_size_bytes = size


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def _nothing() -> None:
    pass
