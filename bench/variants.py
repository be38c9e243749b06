"""The five ways to run one step on N workers that the overhead benchmark compares, and the shapes of a step.

Shapes carry the names of Ray's own microbenchmarks (`ray/_private/ray_experimental_perf.py`): `scatter-gather` (one input
to all, a result of each; `single-actor` with one worker), `chain` (through all workers, one after the other), `multiple
args` (an input of its own for each worker). `reduce` is what dagrl's own phases are: one input to all, results joined on the
workers in a tree of an arity; Ray's ways have the driver read and join them.

Each executor has actors of its own; plain calls share those of the eager one. Ray's graphs poll while they wait, so the
actors of the hand-written graph are stopped (SIGSTOP) while another variant is measured.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.dag import DAGContext, InputNode, MultiOutputNode

from bench.worker import SMALL, BenchWorker
from dagrl.layout import ParallelLayout
from dagrl.phase import Input, Phase, Shard, Value, phase
from dagrl.scheduler import Scheduler, SchedulerOptions
from dagrl.shapes import Batch, Bucket, Field
from dagrl.worker_group import WorkerGroup

VARIANTS = ("ray_calls", "ray_calls_put", "ray_flat_graph", "dagrl_compiled", "dagrl_eager")
SHAPES = ("scatter-gather", "chain", "multiple args", "reduce")
ARITY = SchedulerOptions().arity

IN_FLIGHT = 2
ENVELOPE = 1 << 16
DEADLINE_S = 120


@phase
def scatter_gather(train: Shard, value: Input) -> Value:
    """Every worker gets the input; every result goes to the driver."""
    return train.map("step", value)


@phase
def chain(train: Shard, value: Input) -> Value:
    """Through all workers, one after the other."""
    passed = train[0].map("echo", value)
    for worker in train.workers[1:]:
        passed = train[worker].map("echo", passed)
    return passed


@phase(inputs={"tokens": Field("uint8"), "lengths": Field("int64", "row")})
def multiple_args(train: Shard, batch: Input) -> Value:
    """Each shard, of one worker, gets rows of its own."""
    return train.map("step", batch)


@phase
def reduced(train: Shard, value: Input) -> Value:
    """Every worker gets the input; results are joined on the workers."""
    return train.reduce("merge", train.map("step", value))


PHASES: dict[str, Phase] = {
    "scatter-gather": scatter_gather,
    "chain": chain,
    "multiple args": multiple_args,
    "reduce": reduced,
}


@dataclass(frozen=True)
class Step:
    """One variant, ready to run: `run(value)` does a step and waits for its results."""

    variant: str
    run: Callable[[Any], object]
    pids: tuple[int, ...] = ()  # of processes that must be stopped while others are measured

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the variant's processes run inside the block only."""
        _signal(self.pids, signal.SIGCONT)
        try:
            yield
        finally:
            _signal(self.pids, signal.SIGSTOP)


@dataclass(frozen=True)
class Actors:
    """The actors of the hand-written graph, of compiled phases, and of everything else."""

    flat: tuple[Any, ...]
    flat_pids: tuple[int, ...]
    compiled: tuple[Any, ...]
    plain: tuple[Any, ...]

    @staticmethod
    def start(count: int, host_resources: Sequence[str] = ()) -> Actors:
        """`count` actors in each set, dealt out over the hosts in equal runs."""
        sets = [
            [_start_actor(host_resources[place * len(host_resources) // count :][:1]) for place in range(count)]
            for _ in range(3)
        ]
        pids = [ray.get([actor.pid.remote() for actor in actors], timeout=DEADLINE_S) for actors in sets]
        return Actors(tuple(sets[0]), tuple(pids[0]), tuple(sets[1]), tuple(sets[2]))

    def first(self, count: int) -> Actors:
        """The same with fewer actors, spread over the hosts as all are."""
        keep = [place * len(self.flat) // count for place in range(count)]
        return Actors(
            *(tuple(one[place] for place in keep) for one in (self.flat, self.flat_pids, self.compiled, self.plain))
        )

    def set_result(self, size: int) -> None:
        """Make every worker answer with `size` bytes; not while a graph is compiled on them."""
        ray.get([actor.set_result.remote(size) for actor in (*self.flat, *self.compiled, *self.plain)], timeout=DEADLINE_S)


def _start_actor(host: Sequence[str]) -> Any:
    actor_class = ray.remote(num_cpus=0, max_restarts=0)(BenchWorker)
    return actor_class.options(resources={name: 0.001 for name in host}).remote()


@contextmanager
def steps(
    shape: str, actors: Actors, variants: Sequence[str], payload_bytes: int, result_bytes: int, arity: int = ARITY
) -> Iterator[list[Step]]:
    """The variants of one shape, compiled for payloads and results of up to these sizes; dagrl's trees have this arity."""
    makers = {
        "ray_calls": _calls,
        "ray_calls_put": _calls_put,
        "ray_flat_graph": _flat_graph,
        "dagrl_compiled": _dagrl("compiled", arity),
        "dagrl_eager": _dagrl("eager", arity),
    }
    closers: list[Callable[[], None]] = []
    made = []
    try:
        for variant in variants:
            run, pids, close = makers[variant](shape, actors, payload_bytes, result_bytes)
            closers.append(close)
            made.append(Step(variant, run, pids))
            _signal(pids, signal.SIGSTOP)
        yield made
    finally:
        for close in reversed(closers):
            close()


Made = tuple[Callable[[Any], object], tuple[int, ...], Callable[[], None]]


def _calls(shape: str, actors: Actors, payload_bytes: int, result_bytes: int) -> Made:
    if shape == "chain":
        return (lambda value: ray.get(_pass_on(actors.plain, value))), (), _nothing
    if shape == "multiple args":
        return (lambda rows: ray.get([a.step.remote(row) for a, row in zip(actors.plain, rows, strict=True)])), (), _nothing
    if shape == "reduce":
        return (lambda value: _merge(ray.get([actor.step.remote(value) for actor in actors.plain]))), (), _nothing
    return (lambda value: ray.get([actor.step.remote(value) for actor in actors.plain])), (), _nothing


def _merge(parts: list[object]) -> object:
    """What a driver does that joins results itself."""
    return BenchWorker().merge(parts)


def _calls_put(shape: str, actors: Actors, payload_bytes: int, result_bytes: int) -> Made:
    run, _, close = _calls(shape, actors, payload_bytes, result_bytes)
    if shape == "multiple args":
        return (lambda rows: run([ray.put(row) for row in rows])), (), close
    return (lambda value: run(ray.put(value))), (), close


def _pass_on(actors: Sequence[Any], value: Any) -> Any:
    for actor in actors:
        value = actor.echo.remote(value)
    return value


def _flat_graph(shape: str, actors: Actors, payload_bytes: int, result_bytes: int) -> Made:
    """The graph one would write by hand, with buffers that never need to grow, in the driver and in the workers."""
    context = DAGContext.get_current()
    before = context.buffer_size_bytes
    context.buffer_size_bytes = payload_bytes + ENVELOPE
    context.get_timeout = context.submit_timeout = DEADLINE_S
    worker_bytes = (payload_bytes if shape == "chain" else result_bytes) + ENVELOPE
    ray.get([actor.__ray_call__.remote(_set_buffer_bytes, worker_bytes) for actor in actors.flat], timeout=DEADLINE_S)
    with InputNode() as start:
        if shape == "chain":
            node: Any = start
            for actor in actors.flat:
                node = actor.echo.bind(node)
        else:
            own = shape == "multiple args"
            node = MultiOutputNode([a.step.bind(start[i] if own else start) for i, a in enumerate(actors.flat)])
    graph = node.experimental_compile(_max_inflight_executions=IN_FLIGHT)
    context.buffer_size_bytes = before

    def close() -> None:
        _signal(actors.flat_pids, signal.SIGCONT)
        graph.teardown()

    if shape == "multiple args":
        return (lambda rows: ray.get(graph.execute(*rows))), actors.flat_pids, close
    if shape == "reduce":
        return (lambda value: _merge(ray.get(graph.execute(value)))), actors.flat_pids, close
    return (lambda value: ray.get(graph.execute(value))), actors.flat_pids, close


def _dagrl(executor: Any, arity: int) -> Callable[[str, Actors, int, int], Made]:
    def make(shape: str, actors: Actors, payload_bytes: int, result_bytes: int) -> Made:
        mine = actors.compiled if executor == "compiled" else actors.plain
        count = len(mine)
        layout = ParallelLayout(dp=count) if shape == "multiple args" else ParallelLayout(tp=count)
        group = WorkerGroup.from_actors(mine, layout)
        # small results are joined on the workers, into one list that must fit
        returned = {"chain": payload_bytes, "scatter-gather": result_bytes * count}.get(shape, result_bytes) + ENVELOPE
        scheduler = Scheduler(
            [group],
            SchedulerOptions(
                executor=executor,
                fallback="error",
                max_in_flight=IN_FLIGHT,
                arity=arity,
                result_bytes=returned,
                compile_s=DEADLINE_S,
                replay_s=DEADLINE_S,
            ),
        )
        step = PHASES[shape]
        if shape == "multiple args":
            scheduler.add(step, buckets=[Bucket(1, width) for width in sorted({SMALL, payload_bytes})])
        else:
            scheduler.add(step, warmup_value=b"x", input_bytes=payload_bytes + ENVELOPE)
        scheduler.compile()
        scheduler.warmup()
        return (lambda value: scheduler.replay(step, value).result()), (), scheduler.close

    return make


def argument(shape: str, variant: str, workers: int, value: Any) -> Any:
    """What a step of this shape and variant is called with, to bring `value` to every worker."""
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
