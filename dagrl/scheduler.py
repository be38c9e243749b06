"""The scheduler: compiles phases once, warms them up at every bucket, and then only replays them.

    scheduler = Scheduler([train, generation], SchedulerOptions(executor="compiled"))
    scheduler.add(train_step, buckets=[Bucket(8, 64)])
    scheduler.compile()
    scheduler.warmup()
    metrics = scheduler.replay(train_step, batch).result()

Replays of phases on different groups overlap; replays on one group run in the order they were submitted, on every worker
(tickets). A batch is split over the shards by tokens and padded to the smallest bucket that fits. Different threads may
submit and wait at once, each with phases of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from ray.exceptions import RayError

from dagrl.errors import GraphError, PhaseError, RunError
from dagrl.executors.base import Executable, Executor, Limits, accelerated
from dagrl.executors.packet import ENVELOPE_BYTES, Header, Packet, payload_bytes
from dagrl.executors.shards import side_by_side
from dagrl.failures import collect_outcome
from dagrl.graph import PhaseGraph, WorkerRef
from dagrl.phase import Phase, replicas_per_graph
from dagrl.replay import Replay, Split
from dagrl.shapes import Batch, Bucket, Scalar, choose_bucket, empty_batch, padding_share, split_rows
from dagrl.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

SETTLING_S, SETTLING_REPLAYS = 0.1, 20
"""How long, and how often at most, a warm-up repeats a replay: code is specialized, and caches fill, within that."""


@dataclass(frozen=True)
class SchedulerOptions:
    """How phases are compiled and how long anything may take; the fields are those of `executor_cfg` and `timeouts`."""

    executor: Literal["compiled", "eager"] = "compiled"
    fallback: Literal["eager", "error"] = "eager"
    max_in_flight: int = 2
    arity: int = 8
    result_bytes: int = 1 << 20
    compile_s: float = 60.0
    warmup_s: float = 180.0
    replay_s: float = 120.0
    teardown_s: float = 8.0


@dataclass(frozen=True)
class _Seats:
    """The workers of one role in one graph: their ranks in the graph's order, and those that the phase has nodes on."""

    role: str
    ranks: tuple[int, ...]
    used: tuple[int, ...]


@dataclass(frozen=True)
class _Compiled:
    """A graph of a phase that is ready to be replayed: the shards that are side by side in it, and its workers."""

    executable: Executable
    shards: tuple[int, ...]
    seats: tuple[_Seats, ...]


@dataclass
class _Entry:
    """A phase that was added, and what was made of it."""

    phase: Phase
    graph: PhaseGraph
    buckets: tuple[Bucket, ...]
    scalars: Mapping[str, Scalar]
    warmup_value: object
    limits: Limits
    compiled: list[_Compiled] = field(default_factory=list)
    in_flight: deque[Replay] = field(default_factory=deque)
    reading: threading.RLock = field(default_factory=threading.RLock)
    replays: int = 0

    @property
    def shards(self) -> int:
        """How many data-parallel shards (graphs as they were traced) the phase is compiled on."""
        return sum(len(one.shards) for one in self.compiled)

    def by_shard(self, packets: Sequence[Sequence[Packet]]) -> list[Sequence[Packet]]:
        """The packets of every shard, from those of every graph."""
        found: dict[int, Sequence[Packet]] = {}
        count = len(self.graph.outputs)
        for one, mine in zip(self.compiled, packets, strict=True):
            for place, shard in enumerate(one.shards):
                found[shard] = mine[place * count : (place + 1) * count]
        return [found[shard] for shard in range(len(found))]


class Scheduler:
    """Phases over worker groups; see the module's first lines. Use it as a context manager, or call `close`."""

    def __init__(self, groups: Sequence[WorkerGroup], options: SchedulerOptions | None = None) -> None:
        self.groups = {group.role.name: group for group in groups}
        self.options = options or SchedulerOptions()
        self._entries: dict[str, _Entry] = {}
        self._tickets = {role: [0] * group.layout.world_size for role, group in self.groups.items()}
        self._broken = ""
        self._lock = threading.RLock()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add(
        self,
        phase: Phase,
        *,
        buckets: Sequence[Bucket] = (),
        scalars: Mapping[str, Scalar] | None = None,
        warmup_value: object = None,
        input_bytes: int | None = None,
        result_bytes: int | None = None,
    ) -> None:
        """Trace a phase and remember the shapes it will be replayed at.

        A phase with `inputs` takes batches: give its `buckets` (of one shard), and the `scalars` that its warm-up batches
        carry. Any other phase is warmed up with `warmup_value`. `input_bytes` and `result_bytes` size its channels;
        inputs are sized from the largest bucket by default. Raises GraphError.
        """
        graph = phase.trace({name: group.role for name, group in self.groups.items()}, self.options.arity)
        if phase.inputs is not None:
            self._check_batch_phase(phase, buckets)
        limits = Limits(
            input_bytes=input_bytes or channel_bytes(phase, buckets, scalars, warmup_value),
            result_bytes=result_bytes or self.options.result_bytes,
            max_in_flight=self.options.max_in_flight,
            compile_s=self.options.compile_s,
            replay_s=self.options.replay_s,
            teardown_s=self.options.teardown_s,
        )
        self._entries[phase.name] = _Entry(phase, graph, tuple(buckets), dict(scalars or {}), warmup_value, limits)

    def compile(self) -> None:
        """Compile every phase that is not compiled yet, in one graph for all shards on the same hosts."""
        for entry in self._entries.values():
            if not entry.compiled:
                entry.compiled = self._compile(entry)

    def warmup(self, before: Callable[[Phase], None] | None = None) -> None:
        """Replay each phase at each of its buckets, largest first. Workers leave their state as it was.

        Replays that cost next to nothing are repeated, so that the first real one finds what the median one does: memory
        that was touched, code that was run. `before` is called with each phase before its first replay.
        """
        for entry in self._entries.values():
            if before is not None:
                before(entry.phase)
            for value in self._warmup_inputs(entry):
                self._warm_up(entry, value)

    def _warm_up(self, entry: _Entry, value: object) -> None:
        """Replay one input once, and again while another replay fits `SETTLING_S`."""
        spent = 0.0
        for _ in range(SETTLING_REPLAYS):
            started = time.perf_counter()
            self._submit(entry, value, warmup=True, deadline_s=self.options.warmup_s).result()
            last = time.perf_counter() - started
            spent += last
            if spent + last > SETTLING_S:
                break

    def replay(
        self,
        phase: Phase,
        value: object = None,
        *,
        rows: Sequence[npt.NDArray[np.intp]] | None = None,
        deadline_s: float | None = None,
    ) -> Replay:
        """Start a phase on all its shards and return the future of its result.

        `value` is a `Batch` of any number of rows for a phase with `inputs`, else it goes to every shard as it is. `rows`:
        the positions of each shard's rows; None: equally many, tokens balanced.
        """
        entry = self._entries.get(phase.name)
        if entry is None or not entry.compiled:
            raise RunError(f"phase {phase.name!r} is not compiled; call scheduler.add(...) and scheduler.compile() first")
        return self._submit(entry, value, warmup=False, deadline_s=deadline_s or self.options.replay_s, rows=rows)

    def graphs(self) -> dict[str, PhaseGraph]:
        """The traced graph of each phase."""
        return {name: entry.graph for name, entry in self._entries.items()}

    def recover(self) -> None:
        """After a failure: tear the graphs down and compile them again on the groups' actors, which must all be alive.

        Warm up again before the next replay.
        """
        self._teardown()
        for role, group in self.groups.items():
            group.reset_tickets(self._tickets[role])
        self._broken = ""
        self.compile()

    def replace_group(self, group: WorkerGroup) -> None:
        """Use a new group in place of one that lost workers; call `recover` to compile on it."""
        self.groups[group.role.name] = group
        self._tickets[group.role.name] = [0] * group.layout.world_size

    def close(self) -> None:
        """Tear every graph down, within the teardown deadline."""
        self._teardown()
        self._entries.clear()

    def finish(self, replay: Replay) -> None:
        """Read the result of `replay`, and of those of its phase submitted before it (called by `Replay.result`)."""
        entry = self._entries[replay.phase]
        with entry.reading:  # not the scheduler's lock: replays of other phases start while this one is waited for
            while not replay.done:
                self._finish_one(entry.in_flight.popleft())

    def _finish_one(self, replay: Replay) -> None:
        try:
            replay.succeed(self._entries[replay.phase].by_shard(collect_outcome(replay, self.groups)))
        except PhaseError as error:
            self._broken = error.breaks or self._broken
            replay.fail(error)

    def _check_batch_phase(self, phase: Phase, buckets: Sequence[Bucket]) -> None:
        if not buckets:
            raise GraphError(f"phase {phase.name!r} takes batches; add it with buckets=[Bucket(sequences, tokens), ...]")
        shards = {role: self.groups[role].layout.dp for role in phase.roles}
        if any(count != 1 for count in replicas_per_graph(shards).values()):
            raise GraphError(
                f"phase {phase.name!r} splits batches over shards, but its groups have different numbers of them: {shards}; "
                "give them the same data-parallel size, or pass a value that is not a batch"
            )

    def _warmup_inputs(self, entry: _Entry) -> list[object]:
        if entry.phase.inputs is None:
            return [entry.warmup_value]
        shards = entry.shards
        largest_first = sorted(entry.buckets, key=lambda bucket: -bucket.sequences * bucket.tokens)
        whole = [Bucket(bucket.sequences * shards, bucket.tokens) for bucket in largest_first]
        return [empty_batch(entry.phase.inputs, bucket, entry.scalars) for bucket in whole]

    def _compile(self, entry: _Entry) -> list[_Compiled]:
        try:
            return self._compile_with(_executor(self.options.executor), entry)
        except (RayError, RuntimeError, ValueError, TimeoutError) as error:
            if self.options.executor == "eager" or self.options.fallback == "error":
                raise RunError(
                    f"phase {entry.phase.name!r} could not be compiled: {error}. Set executor: eager, or fallback: eager"
                ) from error
            logger.warning("phase %r could not be compiled and runs eagerly: %s", entry.phase.name, error)
            return self._compile_with(_executor("eager"), entry)

    def _compile_with(self, executor: Executor, entry: _Entry) -> list[_Compiled]:
        ranks_of = self._ranks_of_shards(entry.phase)
        return [
            self._compile_shards(executor, entry, shards, [ranks_of[shard] for shard in shards])
            for shards in self._shards_of_graphs(entry.graph, ranks_of)
        ]

    def _compile_shards(
        self, executor: Executor, entry: _Entry, shards: Sequence[int], ranks_of: Sequence[Mapping[str, Sequence[int]]]
    ) -> _Compiled:
        """Some shards in one graph; `ranks_of` each."""
        splits = entry.phase.inputs is not None
        graph = side_by_side(entry.graph, len(shards), splits)
        limits = replace(entry.limits, input_bytes=entry.limits.input_bytes * (len(shards) if splits else 1))
        ranks = {role: [rank for mine in ranks_of for rank in mine[role]] for role in entry.phase.roles}
        actors = {role: [self.groups[role].actors[rank] for rank in mine] for role, mine in ranks.items()}
        used = {node.worker for node in graph.nodes}
        seats = tuple(
            _Seats(role, tuple(mine), tuple(rank for at, rank in enumerate(mine) if WorkerRef(role, at) in used))
            for role, mine in ranks.items()
        )
        return _Compiled(executor.compile(graph, actors, limits), tuple(shards), seats)

    def _shards_of_graphs(self, graph: PhaseGraph, ranks_of: Sequence[Mapping[str, Sequence[int]]]) -> list[list[int]]:
        """Which shards go into one graph: those on the same hosts, so that no host gets rows that it does not need.

        Each has a graph of its own where its workers form a communicator for their edges.
        """
        if accelerated(graph):
            return [[shard] for shard in range(len(ranks_of))]
        together: dict[frozenset[str], list[int]] = {}
        for shard, ranks in enumerate(ranks_of):
            nodes = frozenset(self.groups[role].places[rank].node for role, mine in ranks.items() for rank in mine)
            together.setdefault(nodes, []).append(shard)
        return list(together.values())

    def _ranks_of_shards(self, phase: Phase) -> list[dict[str, list[int]]]:
        """For each shard of a phase (a graph as it was traced), the ranks of each role in the graph's order."""
        layouts = {role: self.groups[role].layout for role in phase.roles}
        replicas = replicas_per_graph({role: layout.dp for role, layout in layouts.items()})
        role = phase.roles[0]
        return [
            {
                role: [rank for dp in range(index * count, (index + 1) * count) for rank in layouts[role].shard(dp)]
                for role, count in replicas.items()
            }
            for index in range(layouts[role].dp // replicas[role])
        ]

    def _submit(
        self,
        entry: _Entry,
        value: object,
        *,
        warmup: bool,
        deadline_s: float,
        rows: Sequence[npt.NDArray[np.intp]] | None = None,
    ) -> Replay:
        if len(entry.in_flight) >= entry.limits.max_in_flight:
            self.finish(entry.in_flight[0])
        with self._lock:
            if self._broken:
                raise RunError(f"{self._broken}; call scheduler.recover() after the workers are whole again")
            values, split, padding = self._share_out(entry, value, rows)
            self._check_size(entry, values[0], 1 if split is None else len(entry.compiled[0].shards))
            tickets = [self._take_tickets(one.seats) for one in entry.compiled]
            submitted = [
                (one.executable, _submit_packet(one, Packet(Header(entry.phase.name, entry.replays, warmup, mine), item)))
                for one, mine, item in zip(entry.compiled, tickets, values, strict=True)
            ]
            replay = Replay(self, entry.phase.name, entry.replays, submitted, split, padding, deadline_s)
            entry.replays += 1
            entry.in_flight.append(replay)
            return replay

    def _check_size(self, entry: _Entry, value: object, shards: int) -> None:
        """Raise RunError for the input of some shards that does not fit; every shard's has the same size."""
        needed = -(-payload_bytes(value) // shards) + ENVELOPE_BYTES
        if needed > entry.limits.input_bytes:
            raise RunError(
                f"the input of phase {entry.phase.name!r} needs {needed} bytes a shard, but its channel was sized for "
                f"{entry.limits.input_bytes} from the largest warmed-up input; add it with a larger bucket or input_bytes"
            )

    def _share_out(
        self, entry: _Entry, value: object, rows: Sequence[npt.NDArray[np.intp]] | None
    ) -> tuple[list[object], Split | None, float | None]:
        if entry.phase.inputs is None or not isinstance(value, Batch):
            return [value] * len(entry.compiled), None, None
        lengths, shards = value["lengths"].astype("int64"), entry.shards
        rows = rows or split_rows(lengths, shards)
        bucket = choose_bucket(entry.buckets, max(len(mine) for mine in rows), int(lengths.max(initial=1)))
        split = Split(tuple(rows), bucket, value.tokens)
        return [split.share(value, one.shards) for one in entry.compiled], split, padding_share(lengths, bucket, shards)

    def _take_tickets(self, seats_of_graph: Sequence[_Seats]) -> dict[str, int | tuple[int, ...]]:
        """The tickets of a graph's workers; only workers that the phase uses move on to their next."""
        mine: dict[str, int | tuple[int, ...]] = {}
        for seats in seats_of_graph:
            tickets = self._tickets[seats.role]
            first, *others = [tickets[rank] for rank in seats.ranks]
            mine[seats.role] = first if others.count(first) == len(others) else (first, *others)
            for rank in seats.used:
                tickets[rank] += 1
        return mine

    def _teardown(self) -> None:
        with self._lock:
            deadline = time.monotonic() + self.options.teardown_s
            for entry in self._entries.values():
                for one in entry.compiled:
                    one.executable.teardown(max(0.1, deadline - time.monotonic()))
                entry.compiled = []
                entry.in_flight.clear()


def channel_bytes(
    phase: Phase, buckets: Sequence[Bucket], scalars: Mapping[str, Scalar] | None = None, warmup_value: object = None
) -> int:
    """Room that the input of one shard needs in its channel: that of the largest it is warmed up at."""
    samples = [warmup_value] if phase.inputs is None else [empty_batch(phase.inputs, bucket, scalars) for bucket in buckets]
    return max(map(payload_bytes, samples)) + 2 * ENVELOPE_BYTES


def _submit_packet(compiled: _Compiled, packet: Packet) -> Any:
    """What `fetch` takes, or the error of a graph that lost a worker since its last replay, for the result to raise."""
    try:
        return compiled.executable.submit(packet)
    except RayError as error:
        return error


def _executor(name: str) -> Executor:
    """The executor of that name; Ray's graph modules are imported only when they are used."""
    if name == "eager":
        from dagrl.executors.eager import EagerExecutor

        return EagerExecutor()
    from dagrl.executors.compiled import CompiledExecutor

    return CompiledExecutor()
