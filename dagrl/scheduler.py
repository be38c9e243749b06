"""The scheduler: compiles phases once, warms them up at every bucket, and then only replays them.

    scheduler = Scheduler([train, generation], SchedulerOptions(executor="compiled"))
    scheduler.add(train_step, buckets=[Bucket(8, 64)])
    scheduler.compile()
    scheduler.warmup()
    metrics = scheduler.replay(train_step, batch).result()

Replays of phases on different groups overlap; replays on one group run in the order they were submitted, on every worker
(tickets). A batch is split over the shards by tokens and padded to the smallest bucket that fits. Different threads may
submit and wait at once, for one phase too.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from ray.exceptions import RayError

from dagrl.compiling import Compiled, Seats, check_groups_apart, compile_phase, executor_of
from dagrl.deadline import Deadline
from dagrl.errors import DeadlineError, GraphError, LayoutError, PhaseError, RunError
from dagrl.executors.base import Executor, Limits
from dagrl.executors.packet import ENVELOPE_BYTES, Header, Packet, payload_bytes
from dagrl.failures import collect_outcome
from dagrl.graph import PhaseGraph
from dagrl.phase import Phase, replicas_per_graph
from dagrl.replay import Replay, Split
from dagrl.shapes import (
    Bucket,
    FieldTypes,
    Scalar,
    check_batch,
    check_rows,
    choose_bucket,
    empty_batch,
    field_types,
    longest_row,
    padding_share,
    split_rows,
)
from dagrl.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

SETTLING_S, SETTLING_REPLAYS = 0.1, 20
"""How long, and how often at most, a warm-up repeats a replay: code is specialized, and caches fill, within that."""

SLOW_S = 1.0
"""A first replay that takes longer is not repeated: it is not only slow for its imports and for edges that are opened."""


_schedulers: weakref.WeakSet[Scheduler] = weakref.WeakSet()
"""Those of this process: a worker takes turns as one of them says, so no two have graphs on it at once."""


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
    grace_s: float = 30.0
    teardown_s: float = 8.0


@dataclass
class _Entry:
    """A phase that was added, and what was made of it."""

    phase: Phase
    graph: PhaseGraph
    buckets: tuple[Bucket, ...]
    scalars: Mapping[str, Scalar]
    token_ids: int | None
    warmup_value: object
    limits: Limits
    fields: FieldTypes | None  # of its batches
    compiled: list[Compiled] = field(default_factory=list)
    groups: Mapping[str, WorkerGroup] = field(default_factory=dict)  # that it is compiled on
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
        check_groups_apart(groups)
        self.groups = {group.role.name: group for group in groups}
        self.options = options or SchedulerOptions()
        self._entries: dict[str, _Entry] = {}
        self._tickets = {role: [0] * group.layout.world_size for role, group in self.groups.items()}
        self._executors: dict[str, Executor] = {}  # that made what is compiled now
        self._broken: PhaseError | None = None
        self._lock = threading.RLock()
        _schedulers.add(self)

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
        token_ids: int | None = None,
        warmup_value: object = None,
        input_bytes: int | None = None,
        result_bytes: int | None = None,
    ) -> None:
        """Trace a phase and remember the shapes it will be replayed at.

        A phase with `inputs` takes batches: give its `buckets` (of one shard), and what warm-up batches carry: `scalars`
        and `tokens` below `token_ids` (all 1 without). Any other phase is warmed up with `warmup_value`. `input_bytes` and
        `result_bytes` size its channels; inputs are sized from the largest bucket by default. Raises GraphError, also for a
        name that is taken.
        """
        if phase.name in self._entries:
            raise GraphError(f"a phase {phase.name!r} was added already; give one of the two another name")
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
            result_key=f"result_bytes of Scheduler.add({phase.name})" if result_bytes else Limits.result_key,
        )
        fields = None if phase.inputs is None else field_types(phase.inputs)
        carried = dict(scalars or {}), token_ids, warmup_value
        self._entries[phase.name] = _Entry(phase, graph, tuple(buckets), *carried, limits, fields)

    def compile(self) -> None:
        """Compile every phase that is not compiled yet, in one graph for all shards on the same hosts.

        The first time, the workers' turns begin where this scheduler's replays do: another one may have used them. Raises
        RunError while it has graphs there.
        """
        if not self._compiled:
            self._check_free()
            for role, group in self.groups.items():
                group.reset_tickets(self._tickets[role], Deadline(self.options.compile_s, "timeouts.compile_s"))
            self._executors.clear()
        for entry in self._entries.values():
            if not entry.compiled:
                entry.groups = {role: self.groups[role] for role in entry.phase.roles}
                entry.compiled = self._compile(entry)

    @property
    def _compiled(self) -> list[str]:
        """The phases that have graphs now."""
        return [name for name, entry in self._entries.items() if entry.compiled]

    def _check_free(self) -> None:
        """Raise RunError where another scheduler's graphs would run between this one's, in no order."""
        mine = {actor._actor_id: role for role, group in self.groups.items() for actor in group.actors}
        for other in list(_schedulers):
            phases = other._compiled if other is not self else []
            theirs = [actor._actor_id for group in other.groups.values() for actor in group.actors]
            shared = sorted({mine[actor] for actor in theirs if actor in mine})
            if phases and shared:
                raise RunError(
                    f"actors of {', '.join(shared)} run the phases {', '.join(phases)} of another Scheduler, and take turns "
                    "as one alone says; close that one first (close(), or the end of its `with`), or add all phases to one"
                )

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
        """Replay one input, and again while another replay fits `SETTLING_S`, in which the first one does not count."""
        spent = 0.0
        for number in range(SETTLING_REPLAYS):
            started = time.perf_counter()
            self._submit(entry, value, warmup=True, deadline_s=self.options.warmup_s).result()
            last = time.perf_counter() - started
            spent += last if number else 0.0
            if last > SLOW_S or (number and spent + last > SETTLING_S):
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
        the positions of each shard's rows, each row's once; None: equally many, tokens balanced. Raises DataError for
        what is no batch of the phase's `inputs`; PhaseError after a failure that broke a graph: `recover` first.
        """
        entry = self._entries.get(phase.name)
        if entry is None or not entry.compiled or entry.phase is not phase:
            other = "; another phase of that name was added" if entry is not None and entry.phase is not phase else ""
            raise RunError(
                f"phase {phase.name!r} is not compiled{other}; call scheduler.add(...) and scheduler.compile() first"
            )
        if deadline_s is None:
            deadline_s = self.options.replay_s
        elif not 0 < deadline_s < math.inf:
            raise RunError(f"deadline_s is {deadline_s}; expected seconds, more than 0 and not without end")
        return self._submit(entry, value, warmup=False, deadline_s=deadline_s, rows=rows)

    def graphs(self) -> dict[str, PhaseGraph]:
        """The traced graph of each phase."""
        return {name: entry.graph for name, entry in self._entries.items()}

    def recover(self) -> None:
        """After a failure: tear the graphs down and compile them again on the groups' actors, which must all be alive.

        Warm up again before the next replay.
        """
        self._teardown()
        self.compile()
        self._broken = None

    def replace_group(self, group: WorkerGroup) -> None:
        """Use a new group in place of one that lost workers; call `recover` to compile on it.

        Raises LayoutError for a role that this scheduler does not have, or another layout than phases were traced for.
        """
        known = self.groups.get(group.role.name)
        if known is None:
            raise LayoutError(f"there is no group {group.role.name!r} to replace; there are {', '.join(self.groups)}")
        if known.layout != group.layout:
            raise LayoutError(
                f"the group {group.role.name!r} has the layout {group.layout.describe()}, but phases were traced for "
                f"{known.layout.describe()}; make one of that layout, or another scheduler"
            )
        check_groups_apart([group, *(other for other in self.groups.values() if other is not known)])
        self.groups[group.role.name] = group

    def close(self) -> None:
        """Tear every graph down, within the teardown deadline."""
        self._teardown()
        self._entries.clear()

    def finish(self, replay: Replay, until: float = math.inf) -> None:
        """Read the result of `replay`, and of those of its phase submitted before it (called by `Replay.result`).

        Raises DeadlineError when it is not there by `until` (`time.monotonic`).
        """
        entry = self._entries[replay.phase]
        # not the scheduler's lock: replays of other phases start while this one is waited for
        if not entry.reading.acquire(blocking=until == math.inf):
            if not entry.reading.acquire(timeout=max(0.0, until - time.monotonic())):
                raise DeadlineError(f"phase {replay.phase!r}: another thread waits for its results; ask again")
        try:
            while not replay.done or (entry.in_flight and entry.in_flight[0] is replay):
                self._finish_one(entry, entry.in_flight[0], until)
        finally:
            entry.reading.release()

    def _finish_one(self, entry: _Entry, replay: Replay, until: float) -> None:
        """Read the oldest replay of a phase; it stays the oldest if that is interrupted, or not over by `until`."""
        try:
            if not replay.done:  # else an interrupt came before it was taken out
                self._end(replay, entry, collect_outcome(replay, entry.groups, until))
        except PhaseError as error:
            if not replay.done:  # else a teardown has ended it, and closed what it was read from
                self._broken = self._broken or (error if error.breaks else None)
                replay.fail(error)
        if entry.in_flight and entry.in_flight[0] is replay:  # a teardown may have ended it meanwhile
            entry.in_flight.popleft()

    def _end(self, replay: Replay, entry: _Entry, packets: Sequence[Sequence[Packet]]) -> None:
        try:
            replay.succeed(entry.by_shard(packets))
        except Exception as error:  # of values that do not fit together; the replay is over, and its graph is whole
            text = f"phase {replay.phase!r}, replay {replay.number}: the results of its shards do not make one: {error}"
            raise PhaseError((), text) from error

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
        return [empty_batch(entry.phase.inputs, bucket, entry.scalars, entry.token_ids) for bucket in whole]

    def _compile(self, entry: _Entry) -> list[Compiled]:
        try:
            return self._compile_with(self.options.executor, entry)
        except (RayError, RuntimeError, ValueError, TimeoutError) as error:
            if self.options.executor == "eager" or self.options.fallback == "error":
                raise RunError(
                    f"phase {entry.phase.name!r} could not be compiled: {error}. Set executor: eager, or fallback: eager"
                ) from error
            logger.warning("phase %r could not be compiled and runs eagerly: %s", entry.phase.name, error)
            return self._compile_with("eager", entry)

    def _compile_with(self, name: str, entry: _Entry) -> list[Compiled]:
        executor = self._executors.setdefault(name, executor_of(name))
        limits = replace(entry.limits, may_kill=all(group.owned for group in entry.groups.values()))
        return compile_phase(executor, entry.phase, entry.graph, self.groups, limits)

    def _submit(
        self,
        entry: _Entry,
        value: object,
        *,
        warmup: bool,
        deadline_s: float,
        rows: Sequence[npt.NDArray[np.intp]] | None = None,
    ) -> Replay:
        """Start a replay, once there is room for it: with `max_in_flight` under way, the oldest is waited for first."""
        while True:
            with self._lock:
                if self._broken is not None:
                    advice = f"{self._broken.breaks}; call scheduler.recover() after the workers are whole again"
                    raise PhaseError(self._broken.failures, advice, self._broken.breaks)
                if not entry.compiled:  # torn down since, by another thread
                    raise RunError(f"phase {entry.phase.name!r} is not compiled; call scheduler.compile() first")
                if len(entry.in_flight) < entry.limits.max_in_flight:
                    return self._start(entry, value, warmup, deadline_s, rows)
                oldest = entry.in_flight[0]
            self.finish(oldest)  # without the lock: replays of other phases start meanwhile, and other threads take the room

    def _start(
        self, entry: _Entry, value: object, warmup: bool, deadline_s: float, rows: Sequence[npt.NDArray[np.intp]] | None
    ) -> Replay:
        """Take the tickets of a replay and send it; under the scheduler's lock."""
        values, split, padding = self._share_out(entry, value, rows)
        self._check_size(entry, values[0], 1 if split is None else len(entry.compiled[0].shards))
        number, submitted = entry.replays, []
        try:
            tickets = [self._take_tickets(one.seats) for one in entry.compiled]
            for one, mine, item in zip(entry.compiled, tickets, values, strict=True):
                packet = Packet(Header(entry.phase.name, number, warmup, mine, deadline_s), item)
                submitted.append((one.executable, _submit_packet(one, packet)))
            replay = Replay(self, entry.phase.name, number, submitted, split, padding, deadline_s, self.options.grace_s)
            entry.replays += 1
            entry.in_flight.append(replay)
        except BaseException as error:  # some workers have their ticket, others would wait for theirs for ever
            text = f"replay {number} of phase {entry.phase.name!r} could not be sent to all its workers: {error}"
            self._broken = PhaseError((), breaks=text)
            raise
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
        if entry.fields is None:
            return [value] * len(entry.compiled), None, None
        value = check_batch(entry.phase.name, value, entry.fields)
        longest = longest_row(entry.phase.name, value)
        lengths, shards = value["lengths"].astype("int64"), entry.shards
        if rows is None:
            rows = split_rows(lengths, shards)
        else:
            check_rows(entry.phase.name, rows, shards, value.rows)
        bucket = choose_bucket(entry.buckets, max(map(len, rows)), longest)
        split = Split(tuple(rows), bucket, value.tokens)
        return [split.share(value, one.shards) for one in entry.compiled], split, padding_share(lengths, bucket, shards)

    def _take_tickets(self, seats_of_graph: Sequence[Seats]) -> dict[str, int | tuple[int, ...]]:
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
            entries = list(self._entries.values())
            if any(entry.in_flight for entry in entries):  # loops that wait for a turn would not end before it comes
                for role, group in self.groups.items():
                    group.pass_tickets(self._tickets[role])
            for replay in [replay for entry in entries for replay in entry.in_flight]:
                text = f"phase {replay.phase!r}, replay {replay.number} was under way when its graphs were torn down"
                replay.fail(PhaseError((), f"{text}; replay it again"))
            live = [one.executable for entry in entries for one in entry.compiled]
            with ThreadPoolExecutor(max(1, len(live)), thread_name_prefix="teardown") as threads:
                list(threads.map(lambda one: one.teardown(self.options.teardown_s), live))
            for entry in entries:
                entry.compiled = []
                entry.in_flight.clear()


def channel_bytes(
    phase: Phase, buckets: Sequence[Bucket], scalars: Mapping[str, Scalar] | None = None, warmup_value: object = None
) -> int:
    """Room that the input of one shard needs in its channel: that of the largest it is warmed up at."""
    samples = [warmup_value] if phase.inputs is None else [empty_batch(phase.inputs, bucket, scalars) for bucket in buckets]
    return max(map(payload_bytes, samples)) + 2 * ENVELOPE_BYTES


def _submit_packet(compiled: Compiled, packet: Packet) -> Any:
    """What `fetch` takes, or the error of a graph that lost a worker since its last replay, for the result to raise."""
    try:
        return compiled.executable.submit(packet)
    except RayError as error:
        return error
