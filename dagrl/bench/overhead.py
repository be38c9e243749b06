"""Measures orchestration overhead: what one step over N workers costs when the workers do no work.

    dagrl bench overhead --quick                      a minute, on any machine
    dagrl bench overhead --json F --plot F            N = 1 to 64, payloads of 100 B to 16 MiB, all sides in turn

Sides of a step:
- `dagrl`: a phase with one compiled graph per data-parallel shard, the default. `dagrl, Ray's engine`: the same phase with
  `engine: ray`, Ray's compiled graph. `dagrl, eager`: under the eager executor.
- `Ray graph`: one compiled graph over all workers, as one would write it by hand with Ray.
- `Ray calls`: actor calls, with the input as an argument. `Ray calls, put`: with the input put into the object store once.

Shapes have the names of Ray's own microbenchmarks (`ray/_private/ray_experimental_perf.py`): `scatter-gather` (one input to
all, one result from each), `chain` (through all workers in turn), `multiple args` (one input per worker, each of which is a
shard). `reduce` is the shape of dagrl's own phases: results are joined on the workers, and by the driver on Ray's sides.
The last case, `many replays`, has the 99th percentile of `--replays` replays, the processor time of the driver and all
workers in one (`cpu_us`), and the cores that they burn while they wait for a sleeping worker (`waiting_cores`).

Sides with compiled graphs have actors of their own. Ray's graphs poll while they wait, so their actors are stopped (SIGSTOP)
while another side takes its turn.
"""

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import ray
from ray.dag import DAGContext, InputNode, MultiOutputNode

from dagrl import Batch, Bucket, Field, Input, ParallelLayout, Scheduler, SchedulerOptions, Shard, Value, WorkerGroup, phase
from dagrl.bench import harness
from dagrl.bench.harness import Column, Contest, Take, Turn
from dagrl.bench.worker import SMALL, BenchWorker, payload
from dagrl.cli.numbers import count, positive, whole
from dagrl.config import ClusterConfig
from dagrl.run.cluster import PRIORITY, ray_cluster
from dagrl.runtime.phase import Phase

MIB = 1 << 20
IN_FLIGHT, ENVELOPE, DEADLINE_S = 2, 1 << 16, 120
PAUSE_S, WAIT_S = 0.25, 3.0

DAGRL: Mapping[str, Mapping[str, Any]] = {
    "dagrl": {},
    "dagrl, Ray's engine": {"engine": "ray"},
    "dagrl, eager": {"executor": "eager"},
}
"""Scheduler options of dagrl's sides."""

SIDES = (*DAGRL, "Ray graph", "Ray calls", "Ray calls, put")
POLLING = ("Ray graph", "dagrl, Ray's engine")
SHARED = ("Ray calls", "Ray calls, put", "dagrl, eager")
"""Sides without compiled graphs; they share one set of actors."""


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


PHASES: Mapping[str, Phase] = {
    "scatter-gather": scatter_gather,
    "chain": chain,
    "multiple args": multiple_args,
    "reduce": reduced,
}


@dataclass(frozen=True)
class Plan:
    """What is measured, and how long a turn is: at most `samples` steps or `seconds`, after `warmup` steps."""

    workers: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    payloads: tuple[int, ...] = (SMALL, MIB, 16 * MIB)
    results: tuple[int, ...] = (MIB,)  # of a worker, besides the small one, with a small input
    shapes: tuple[str, ...] = tuple(PHASES)
    sides: tuple[str, ...] = SIDES
    samples: int = 250
    seconds: float = 0.12
    warmup: int = 20
    replays: int = 20_000
    replay_workers: int = 8


QUICK = Plan(workers=(1, 4), payloads=(SMALL, MIB), results=(), samples=40, warmup=5, replays=2000)


@dataclass(frozen=True)
class Step:
    """One case: a shape over a number of workers, and the bytes of an input and of one worker's result."""

    shape: str
    workers: int
    payload_bytes: int = SMALL
    result_bytes: int = SMALL

    @property
    def name(self) -> str:
        """The case's name."""
        sizes = f", input {_size(self.payload_bytes)}" if self.payload_bytes > SMALL else ""
        sizes += f", results {_size(self.result_bytes)}" if self.result_bytes > SMALL else ""
        return f"{self.shape}, {self.workers} worker{'s' * (self.workers > 1)}{sizes}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_arguments(parser)
    parser.add_argument("--workers", type=_list(count), help="numbers of workers, e.g. 1,8,64")
    parser.add_argument("--payloads", type=_list(count), help="bytes of an input, e.g. 100,1048576")
    parser.add_argument("--results", type=_list(count), help="bytes of a result, besides the small one")
    parser.add_argument("--shapes", type=_list(_one_of(PHASES)), help=f"any of {', '.join(PHASES)}")
    parser.add_argument("--sides", type=_one_of(SIDES), nargs="+", help=f"any of {'; '.join(SIDES)}")
    parser.add_argument("--seconds", type=positive, help="length of a turn")
    parser.add_argument("--replays", type=whole, help="replays whose 99th percentile is measured; 0: none")
    parser.add_argument("--replay-workers", type=count, help="of so many workers, at most (default: 8)")
    parser.add_argument("--quick", action="store_true", help="few workers, few samples")


def run(options: argparse.Namespace) -> None:
    given = {name: value for name in Plan.__dataclass_fields__ if (value := getattr(options, name, None)) is not None}
    plan = replace(QUICK if options.quick else Plan(), **given)
    with bench_cluster():
        actors = Actors.start(max(plan.workers), plan.sides)
        contests = [
            Contest(step.name, {step.name: vars(step)}, partial(sides, plan, step, actors)) for step in steps_of(plan)
        ]
        many = Step("scatter-gather", min(max(plan.workers), plan.replay_workers))
        name = f"many replays, {many.workers} workers"
        if plan.replays and "dagrl" in plan.sides:
            contests.append(Contest(name, {name: vars(many)}, partial(many_replays, name, plan, many, actors)))
        harness.run(options, contests, [Column("CPU us", "cpu_us"), Column("waiting, cores", "waiting_cores")])


def steps_of(plan: Plan) -> list[Step]:
    """Returns all cases: every size in scatter-gather, inputs of up to 1 MiB for each worker, small ones in other shapes."""
    steps = []
    for workers in plan.workers:
        for shape in plan.shapes:
            sizes = {"scatter-gather": plan.payloads, "multiple args": tuple(one for one in plan.payloads if one <= MIB)}
            steps += [Step(shape, workers, size) for size in sizes.get(shape, (SMALL,))]
            steps += [Step(shape, workers, SMALL, size) for size in plan.results if shape == "scatter-gather"]
    return steps


@dataclass(frozen=True)
class Actors:
    """The actors of each side, and the process ids of those that poll."""

    of: Mapping[str, tuple[Any, ...]]
    pids: Mapping[str, tuple[int, ...]]

    @classmethod
    def start(cls, count: int, sides: Sequence[str] = SIDES) -> Self:
        """Starts `count` actors for each set that `sides` need."""
        actor = ray.remote(num_cpus=0, max_restarts=0)(BenchWorker)
        sets = {"shared" if side in SHARED else side for side in sides}
        started = {name: tuple(actor.remote() for _ in range(count)) for name in sorted(sets)}
        pids = {
            name: tuple(ray.get([one.pid.remote() for one in found], timeout=DEADLINE_S)) for name, found in started.items()
        }
        of = {side: started["shared" if side in SHARED else side] for side in sides}
        return cls(of, {side: pids[side] for side in sides if side in POLLING})


@dataclass(frozen=True)
class Ready:
    """A compiled side: `act` runs a step; `pids` are processes to stop while another side runs."""

    act: Callable[[], object]
    pids: tuple[int, ...] = ()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Lets the side's processes run inside the block only."""
        _signal(self.pids, signal.SIGCONT)
        try:
            yield
        finally:
            _signal(self.pids, signal.SIGSTOP)


@contextmanager
def compiled(sides: Sequence[str], step: Step, actors: Actors) -> Iterator[dict[str, Ready]]:
    """Yields the sides of a case, compiled; polling processes are stopped."""
    with ExitStack() as stack:
        made: dict[str, Ready] = {}
        for side in sides:
            mine, pids = actors.of[side][: step.workers], actors.pids.get(side, ())[: step.workers]
            ray.get([actor.set_result.remote(step.result_bytes) for actor in mine], timeout=DEADLINE_S)
            act, close = _makers[side](step, mine)
            stack.callback(close)
            stack.callback(_signal, pids, signal.SIGCONT)
            _signal(pids, signal.SIGSTOP)
            made[side] = Ready(partial(act, argument(step.shape, side, step.workers, payload(step.payload_bytes))), pids)
        yield made


@contextmanager
def sides(plan: Plan, step: Step, actors: Actors) -> Iterator[dict[str, Take]]:
    """Yields the turns of a case's sides."""
    with compiled(plan.sides, step, actors) as made:
        yield {side: partial(_turn, plan, step.name, ready) for side, ready in made.items()}


def _turn(plan: Plan, name: str, ready: Ready) -> dict[str, Turn]:
    taken: list[float] = []
    with ready.awake():
        started = time.perf_counter()
        for _ in range(plan.warmup):
            ready.act()
            if time.perf_counter() - started > plan.seconds / 3:
                break
        started = time.perf_counter()
        while len(taken) < plan.samples and (time.perf_counter() - started < plan.seconds or len(taken) < 3):
            taken.append(_timed(ready.act))
    return {name: Turn(taken)}


@contextmanager
def many_replays(name: str, plan: Plan, step: Step, actors: Actors) -> Iterator[dict[str, Take]]:
    """Yields one side, dagrl, whose turn is many replays."""
    mine = actors.of["dagrl"][: step.workers]

    def turn(replay: Callable[[], object]) -> dict[str, Turn]:
        before = _cpu_s(mine)
        taken = [_timed(replay) for _ in range(plan.replays)]
        spent = _cpu_s(mine) - before
        ray.get(mine[0].set_pause.remote(PAUSE_S), timeout=DEADLINE_S)
        replay()
        started, before = time.perf_counter(), _cpu_s(mine)
        while time.perf_counter() - started < WAIT_S:
            replay()
        burnt = (_cpu_s(mine) - before) / (time.perf_counter() - started)
        ray.get(mine[0].set_pause.remote(0.0), timeout=DEADLINE_S)
        return {name: Turn(taken, {"cpu_us": 1e6 * spent / plan.replays, "waiting_cores": burnt})}

    with compiled(["dagrl"], step, actors) as made:
        yield {"dagrl": partial(turn, made["dagrl"].act)}


def _timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def _cpu_s(actors: Sequence[Any]) -> float:
    return time.process_time() + float(sum(ray.get([actor.cpu_s.remote() for actor in actors], timeout=DEADLINE_S)))


Made = tuple[Callable[[Any], object], Callable[[], object]]  # runs one step of a compiled side; releases what was compiled
Maker = Callable[[Step, Sequence[Any]], Made]


def _calls(put: bool, step: Step, actors: Sequence[Any]) -> Made:
    def act(value: Any) -> object:
        if step.shape == "chain":
            passed = ray.put(value) if put else value
            for actor in actors:
                passed = actor.echo.remote(passed)
            return ray.get(passed)
        own = value if step.shape == "multiple args" else [value]
        sent = [ray.put(one) for one in own] if put else own
        sent = sent if len(sent) == len(actors) else sent * len(actors)
        parts = ray.get([actor.step.remote(one) for actor, one in zip(actors, sent, strict=True)])
        return BenchWorker().merge(parts) if step.shape == "reduce" else parts

    return act, lambda: None


def _ray_graph(step: Step, actors: Sequence[Any]) -> Made:
    """Compiles the graph a user would write by hand, with buffers that never grow, in the driver and in the workers."""
    context = DAGContext.get_current()
    before = context.buffer_size_bytes
    context.buffer_size_bytes = step.payload_bytes + ENVELOPE
    context.get_timeout = context.submit_timeout = DEADLINE_S
    size = (step.payload_bytes if step.shape == "chain" else step.result_bytes) + ENVELOPE
    ray.get([actor.__ray_call__.remote(_set_buffer_bytes, size) for actor in actors], timeout=DEADLINE_S)
    own = step.shape == "multiple args"
    with InputNode() as start:
        node: Any = start
        if step.shape == "chain":
            for actor in actors:
                node = actor.echo.bind(node)
        else:
            node = MultiOutputNode([a.step.bind(start[i] if own else start) for i, a in enumerate(actors)])
    graph = node.experimental_compile(_max_inflight_executions=IN_FLIGHT)
    context.buffer_size_bytes = before

    def act(value: Any) -> object:
        found = ray.get(graph.execute(*value) if own else graph.execute(value))
        return BenchWorker().merge(found) if step.shape == "reduce" else found

    return act, graph.teardown


def _set_buffer_bytes(worker: object, size: int) -> None:
    DAGContext.get_current().buffer_size_bytes = size


def _dagrl(options: Mapping[str, Any], step: Step, actors: Sequence[Any]) -> Made:
    shards = len(actors) if step.shape == "multiple args" else 1
    group = WorkerGroup.from_actors(list(actors), ParallelLayout(dp=shards, tp=len(actors) // shards))
    # scatter-gather joins small results on the workers into one list, which must fit
    largest = {"chain": step.payload_bytes, "scatter-gather": step.result_bytes * len(actors)}
    room = largest.get(step.shape, step.result_bytes) + ENVELOPE
    limits: dict[str, Any] = {"max_in_flight": IN_FLIGHT, "compile_s": DEADLINE_S, "replay_s": DEADLINE_S}
    scheduler = Scheduler([group], SchedulerOptions(fallback="error", result_bytes=room, **limits, **options))
    mine = PHASES[step.shape]
    if step.shape == "multiple args":
        scheduler.add(mine, buckets=[Bucket(1, step.payload_bytes)])
    else:
        scheduler.add(mine, warmup_value=b"x", input_bytes=step.payload_bytes + ENVELOPE)
    scheduler.compile()
    scheduler.warmup()
    return (lambda value: scheduler.replay(mine, value).result()), scheduler.close


_makers: Mapping[str, Maker] = {
    **{side: partial(_dagrl, options) for side, options in DAGRL.items()},
    "Ray graph": _ray_graph,
    "Ray calls": partial(_calls, False),
    "Ray calls, put": partial(_calls, True),
}


def argument(shape: str, side: str, workers: int, value: Any) -> Any:
    """Returns the argument with which a step of this shape and side brings `value` to every worker."""
    if shape != "multiple args":
        return value
    if side not in DAGRL:
        return [value] * workers
    tokens = np.tile(np.frombuffer(value, dtype=np.uint8), (workers, 1))
    return Batch({"tokens": tokens, "lengths": np.full(workers, tokens.shape[1])})


@contextmanager
def bench_cluster() -> Iterator[None]:
    """Starts a Ray cluster on this machine. Workers get the process priority of GPU runs.

    The object store has room for many steps of actor calls, which put a copy of the input per call.
    """
    os.environ.update(PRIORITY)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    store = min(16 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
    with ray_cluster(ClusterConfig(num_cpus=os.cpu_count()), {"OMP_NUM_THREADS": "1"}, store_bytes=store):
        yield


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def _size(size: int) -> str:
    for unit, name in ((MIB, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.0f} {name}"
    return f"{size} B"


def _list(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Returns the parser of an option such as `1,8,64`."""

    def parsed(text: str) -> tuple[Any, ...]:
        return tuple(parse(part) for part in text.split(","))

    return parsed


def _one_of(known: Sequence[str] | Mapping[str, object]) -> Callable[[str], str]:
    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"found {text!r}; choose from {', '.join(known)}")
        return text

    return name
