"""The scheduler: compiles phases once, warms them up at every bucket, and then only replays them.

    scheduler = Scheduler([train, generation], SchedulerOptions(executor="compiled"))
    scheduler.add(train_step, buckets=[Bucket(8, 64)])
    scheduler.compile()
    scheduler.warmup()
    metrics = scheduler.replay(train_step, batch).result()

Replays of phases on different groups overlap. Replays on one group run on every worker in the order in which they were
submitted (tickets). A batch is split over the shards by tokens and padded to the smallest bucket that fits. Several threads
may submit and wait at the same time, also for one phase.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np
import numpy.typing as npt
from ray.exceptions import RayError

from dagrl.errors import DeadlineError, GraphError, PhaseError, RunError
from dagrl.runtime.compile import Compiled, Engine, compile_phase, executor_of
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.edges.packet import ENVELOPE_BYTES, Header, Packet, encoded, payload_bytes
from dagrl.runtime.edges.pickling import Encoded, Shares
from dagrl.runtime.executors.base import Executor, GraphLimits
from dagrl.runtime.executors.node import DIED, IDLE
from dagrl.runtime.failures import PendingReplay
from dagrl.runtime.graph import PhaseGraph
from dagrl.runtime.phase import Phase
from dagrl.runtime.replay import Durations, Replay, ReplayQueue
from dagrl.runtime.shapes import (
    Bucket,
    FieldTypes,
    Scalar,
    check_batch,
    choose_bucket,
    empty_batch,
    field_types,
    longest_row,
    padding_share,
)
from dagrl.runtime.split import Codec, Join, Split, check_rows, share_out, split_rows
from dagrl.runtime.tickets import Tickets
from dagrl.runtime.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

DESCRIPTION_BYTES = 1 << 15  # room for what is not an array in an input: types, names, sizes and the message's own header

SETTLING_S, SETTLING_REPLAYS = 0.1, 20
"""The most time and replays for which a warm-up repeats an input, until code is specialized and caches are full."""

REPORT_S = 1.0  # shortest deadline for workers to say what they run
REST_POLL_S = 0.02  # interval at which `at_rest` asks workers what they run
SLOW_S = 1.0  # a first replay that takes longer is not repeated: imports and opening edges alone do not explain its time

_schedulers: weakref.WeakSet[Scheduler] = weakref.WeakSet()
"""The schedulers of this process. A worker follows the tickets of one, so no two may have graphs on it at once."""


@dataclass(frozen=True)
class SchedulerOptions:
    """Options for compiling and replaying phases; engine and deadlines are those of the configuration.

    `engine`: compiled graphs run on dagrl's loop and channels, or on Ray's own. `max_in_flight`:
    replays of a phase under way at once.
    `hang_factor`, `hang_floor_s`: a worker hangs if it runs a replay for that multiple of the longest one of its phase so
    far, and at least that long, or does not answer for as long. None: only the deadline `replay_s` counts.
    `section`: what has these names, for errors.
    """

    executor: Literal["compiled", "eager"] = "compiled"
    engine: Engine = "dagrl"
    fallback: Literal["eager", "error"] = "eager"
    max_in_flight: int = 2
    result_bytes: int = 1 << 20
    compile_s: float = 60.0
    warmup_s: float = 180.0
    replay_s: float = 120.0
    hang_factor: float | None = None
    hang_floor_s: float = 10.0
    grace_s: float = 30.0
    teardown_s: float = 8.0
    section: str = "SchedulerOptions"

    def limits(self, phase: str, input_bytes: int, result_bytes: int | None, room_key: str) -> GraphLimits:
        """Returns the limits of a phase's graphs; `room_key` says how the caller's own users set both sizes."""
        own_key = f"result_bytes of Scheduler.add({phase})"
        result_key = own_key if result_bytes else f"{GraphLimits.result_key}, or {own_key},"
        return GraphLimits(
            input_bytes=input_bytes,
            result_bytes=result_bytes or self.result_bytes,
            max_in_flight=self.max_in_flight,
            compile_s=self.compile_s,
            replay_s=self.replay_s,
            teardown_s=self.teardown_s,
            input_key=room_key or f"input_bytes of Scheduler.add({phase}), or add a larger bucket",
            result_key=room_key or result_key,
        )


@dataclass
class AddedPhase:
    """A phase that was added, with its graphs."""

    phase: Phase
    graph: PhaseGraph
    buckets: tuple[Bucket, ...]
    scalars: Mapping[str, Scalar]
    token_ids: int | None
    warmup_value: object
    codec: Codec | None
    limits: GraphLimits
    in_flight: ReplayQueue
    durations: Durations
    compiled: list[Compiled] = field(default_factory=list)
    groups: Mapping[str, WorkerGroup] = field(default_factory=dict)  # that it is compiled on
    replays: int = 0

    @cached_property
    def fields(self) -> FieldTypes | None:
        """The types of its batches' fields; None if it takes no batches."""
        return None if self.phase.inputs is None else field_types(self.phase.inputs)

    def warmup_inputs(self) -> list[object]:
        """Returns the inputs at which the phase is warmed up, the largest first."""
        if self.phase.inputs is None:
            return [] if self.codec is not None and self.warmup_value is None else [self.warmup_value]
        shards = len(self.compiled)
        largest_first = sorted(self.buckets, key=lambda bucket: -bucket.sequences * bucket.tokens)
        whole = [Bucket(bucket.sequences * shards, bucket.tokens) for bucket in largest_first]
        return [empty_batch(self.phase.inputs, bucket, self.scalars, self.token_ids) for bucket in whole]

    def check_sizes(self, values: Sequence[object]) -> None:
        """Raises RunError if an input does not fit. Only those that a codec split have different sizes."""
        for value in values:
            parts, each = (len(value.parts), "worker") if isinstance(value, Shares) else (1, "shard")
            needed, room = -(-payload_bytes(value) // parts) + ENVELOPE_BYTES, self.limits.input_bytes // parts
            if needed > room:
                raise RunError(
                    f"the input of phase {self.phase.name!r} needs {needed} bytes per {each}, but its channel has room for "
                    f"{room}; raise {self.limits.input_key}"
                )
            if type(value) not in (Encoded, Shares):
                break

    def share_out(
        self, value: object, rows: Sequence[npt.NDArray[np.intp]] | None
    ) -> tuple[list[object], Join, Bucket | None, float | None]:
        """Returns the input of each graph, how results of shards are joined, the bucket and the share of padding."""
        here = [graph.shard for graph in self.compiled]
        if self.fields is None:
            return (*share_out(self.phase.name, self.codec, value, len(here)), None, None)
        value = check_batch(self.phase.name, value, self.fields)
        longest = longest_row(self.phase.name, value)
        lengths = value["lengths"].astype("int64")
        if rows is None:
            rows = split_rows(lengths, len(here))
        else:
            named = len(rows) > max(len(here), here[-1])  # also those without workers, which get no rows
            if named and not any(len(mine) for shard, mine in enumerate(rows) if shard not in here):
                rows = [rows[shard] for shard in here]
            check_rows(self.phase.name, rows, len(here), value.rows)
        bucket = choose_bucket(self.buckets, max(map(len, rows)), longest)
        split = Split(tuple(rows), bucket, value.tokens or longest)
        shares: list[object] = [split.share(value, place) for place in range(len(here))]
        return shares, split.join, bucket, padding_share(lengths, bucket, len(here))


class Scheduler:
    """Runs phases over worker groups; see the top of this file. Use it as a context manager, or call `close`."""

    def __init__(self, groups: Sequence[WorkerGroup], options: SchedulerOptions | None = None) -> None:
        self._tickets = Tickets()
        self.groups: dict[str, WorkerGroup] = {}
        self._joined: set[str] = set()  # roles whose workers do not have tickets of this scheduler yet
        self.options = options or SchedulerOptions()
        self._entries: dict[str, AddedPhase] = {}
        self._executors: dict[str, Executor] = {}  # those of the live graphs
        self._broken: dict[str, PhaseError] = {}  # by role, the first failure that broke a graph
        self._lock = threading.RLock()
        self.join(groups)
        _schedulers.add(self)

    def join(self, groups: Iterable[WorkerGroup]) -> None:
        """Adds groups that have started since. Add their phases next, and call `compile` again.

        Raises LayoutError for a role that it has, and for groups on the actors of those that it has.
        """
        whole = [*self.groups.values(), *groups]
        self._tickets.join(whole)
        self._joined |= {group.role.name for group in whole} - set(self.groups)
        self.groups = {group.role.name: group for group in whole}

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
        codec: Codec | None = None,
        input_bytes: int | None = None,
        result_bytes: int | None = None,
        room_key: str = "",
    ) -> None:
        """Traces a phase and stores the shapes at which it will be replayed.

        A phase with `inputs` takes batches: give its `buckets` (of one shard), and the content of warm-up batches: `scalars`
        and `tokens` below `token_ids` (all 1 without). Any other one is warmed up with `warmup_value`. A `codec` splits the
        input of this phase and joins its results; such a phase without a `warmup_value` is not warmed up. `input_bytes` (the
        arrays and texts of one shard's input, to which room for their description is added) and `result_bytes` size its
        channels; by default the largest warm-up input sizes the input.
        `room_key`: how the caller's own users set both sizes, for errors. Raises GraphError, also for a name that is taken.
        """
        if phase.name in self._entries:
            raise GraphError(f"a phase {phase.name!r} was added already; give one of the two another name")
        graph = phase.trace({name: group.role for name, group in self.groups.items()})
        if phase.inputs is not None:
            if codec is not None:
                raise GraphError(f"phase {phase.name!r} takes batches, which are split by rows; give no codec")
            if not buckets:
                raise GraphError(f"phase {phase.name!r} takes batches; add it with buckets=[Bucket(sequences, tokens), ...]")
            shards = {role: self.groups[role].layout.dp for role in phase.roles}
            if len(set(shards.values())) > 1:
                raise GraphError(
                    f"phase {phase.name!r} splits batches over shards, but its groups have different numbers of them: "
                    f"{shards}; give them the same data-parallel size, or pass a value that is not a batch"
                )
        limits = self.options.limits(
            phase.name,
            input_bytes + DESCRIPTION_BYTES
            if input_bytes
            else channel_bytes(phase, buckets, scalars, self._parts_of(phase, codec, warmup_value)),
            result_bytes,
            room_key,
        )
        queue = ReplayQueue(self._broken, self._tickets.together(phase.roles))
        durations = Durations(self.options.hang_factor, self.options.hang_floor_s)
        self._entries[phase.name] = AddedPhase(
            phase, graph, tuple(buckets), dict(scalars or {}), token_ids, warmup_value, codec, limits, queue, durations
        )

    def compile(self) -> None:
        """Compiles every phase that is not compiled yet: one graph per shard.

        The first time, sets the workers' tickets to this scheduler's: another one may have used the workers. Raises
        RunError while another one has graphs on them.
        """
        self._check_free()
        if not self._compiled:
            self._joined = set(self.groups)
            self._executors.clear()
        self._reset_tickets(self._joined)
        self._joined = set()
        self._compile_missing()

    def _compile_missing(self) -> dict[str, list[int]]:
        """Compiles the shards in service that have no graph; returns them by phase."""
        compiled: dict[str, list[int]] = {}
        for name, entry in self._entries.items():
            entry.groups = {role: self.groups[role] for role in entry.phase.roles}
            new = self._compile(entry)
            entry.compiled = sorted([*entry.compiled, *new], key=lambda graph: graph.shard)
            if new:
                entry.durations.buckets.clear()
                compiled[name] = [graph.shard for graph in new]
        return compiled

    def _reset_tickets(self, roles: Iterable[str]) -> None:
        for role in roles:
            deadline = Deadline(self.options.compile_s, f"{self.options.section}.compile_s")
            self.groups[role].reset_tickets(self._tickets.of(role), deadline)

    @property
    def _compiled(self) -> list[str]:
        """The names of the phases with live graphs."""
        return [name for name, entry in self._entries.items() if entry.compiled]

    def _check_free(self) -> None:
        """Raises RunError if another scheduler has graphs on these actors: tickets would not order the two."""
        mine = {actor._actor_id: role for role, group in self.groups.items() for actor in group.actors}
        for other in list(_schedulers):
            phases = other._compiled if other is not self else []
            theirs = [actor._actor_id for group in other.groups.values() for actor in group.actors]
            shared = sorted({mine[actor] for actor in theirs if actor in mine})
            if phases and shared:
                raise RunError(
                    f"actors of {', '.join(shared)} run the phases {', '.join(phases)} of another Scheduler, and an "
                    "actor follows one Scheduler; close that one first (close(), or the end of its `with`), or add all "
                    "phases to one"
                )

    def warmup(self, before: Callable[[Phase], None] | None = None, only: Iterable[str] | None = None) -> dict[str, float]:
        """Replays each phase at each of its buckets, largest first. Workers leave their state unchanged.

        Short replays are repeated, so that the first real one finds mapped memory and specialized code, as later ones do.
        `before` is called with each phase before its first replay. `only`: the names of the phases (None: all). Returns the
        seconds of each phase, with those of `before`, by name.
        """
        seconds = {}
        for entry in [self._entries[name] for name in (self._entries if only is None else only)]:
            begin = time.perf_counter()
            if before is not None:
                before(entry.phase)
            for value in entry.warmup_inputs():
                self._warm_up(entry, value)
            seconds[entry.phase.name] = time.perf_counter() - begin
        return seconds

    def _warm_up(self, entry: AddedPhase, value: object) -> None:
        """Replays one input, and repeats it while another replay fits `SETTLING_S`; the first one does not count."""
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
        """Starts a phase on all its shards; returns the future of its result.

        `value`: a `Batch` of any number of rows for a phase with `inputs`; any other value is sent whole to every shard.
        `rows`: the positions of each shard's rows, each row once; None: equally many rows, tokens balanced. Raises
        DataError for a batch that does not fit the phase's `inputs`; PhaseError after a failure that broke a graph: call
        `recover` first.
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
            raise RunError(f"deadline_s is {deadline_s}; expected a finite number of seconds above 0")
        return self._submit(entry, value, warmup=False, deadline_s=deadline_s, rows=rows)

    def graphs(self) -> dict[str, PhaseGraph]:
        """Returns the traced graph of each phase."""
        return {name: entry.graph for name, entry in self._entries.items()}

    @property
    def broken(self) -> tuple[str, ...]:
        """The roles whose phases cannot be replayed before `recover`."""
        return tuple(self._broken)

    @contextmanager
    def at_rest(self, timeout_s: float) -> Iterator[None]:
        """Waits until the workers of whole roles run nothing; inside, no thread starts a replay.

        Raises DeadlineError if they have not ended their replays within `timeout_s`.
        """
        until = time.monotonic() + timeout_s
        with self._lock:
            while busy := self._running(max(REPORT_S, until - time.monotonic())):
                if time.monotonic() >= until:
                    raise DeadlineError(f"{', '.join(busy)} workers still run a phase after {timeout_s:g} s")
                time.sleep(REST_POLL_S)
            yield

    def _running(self, timeout_s: float) -> list[str]:
        """Returns the whole roles of which a worker runs something, or does not say."""
        reports = {role: group.reports(timeout_s) for role, group in self.groups.items() if role not in self.broken}
        idle = ("", DIED.what)  # what waits for a dead worker raises by itself
        return [role for role, by_rank in reports.items() if any(report.what not in idle for report in by_rank.values())]

    def recover(self, roles: Iterable[str] | None = None) -> dict[str, list[int]]:
        """Recovers from a failure: compiles the broken graphs again, on the groups' actors, which must all be alive.

        A graph is kept if its workers are the same actors, their loops are running, and all replays sent to it have ended.
        Every other graph is torn down, and the replays under way fail. `roles`: those that failed (None: all); phases of
        others, and replays of these under way, are left alone. Shards out of service (`WorkerGroup.out_of_service`) get no
        graph and no rows of a batch: phases run on their other shards. Returns the shards that were compiled again, by
        phase. Warm up before the next replay.

        Actors that a group did not create are not killed: waits until they have left the failed replays, at most `grace_s`,
        then raises DeadlineError.
        """
        with self._lock:
            roles = self._tickets.together(self.groups if roles is None else {*roles, *self.broken})
            try:
                self._teardown(lambda one: not (one.reusable and one.runs_on(self.groups)), roles)
                if len(roles) == len(self.groups):
                    self._executors.pop("eager", None)
                self._reset_tickets(roles)
                self._wait_for_own_actors([self.groups[role] for role in roles if not self.groups[role].owned])
                compiled = self._compile_missing()
            except BaseException as error:  # some shards may have no graph
                failed = PhaseError((), breaks=f"the graphs could not be recovered: {error}")
                self._broken |= {role: failed for role in roles if role not in self._broken}
                raise
            for role in roles:
                self._broken.pop(role, None)
        logger.info("compiled again, by phase and shard: %s", compiled or "nothing")
        return compiled

    def _wait_for_own_actors(self, groups: Sequence[WorkerGroup]) -> None:
        """Waits until actors that were not created here run nothing; raises DeadlineError if they go on."""
        until = time.monotonic() + self.options.grace_s
        for group in groups:
            while busy := [(rank, one) for rank, one in group.reports(REPORT_S).items() if one not in (IDLE, DIED)]:
                if time.monotonic() >= until:
                    rank, one = busy[0]
                    raise DeadlineError(
                        f"actor {rank} of role {group.role.name!r} has not left a failed replay within "
                        f"{self.options.section}.grace_s = {self.options.grace_s:g} s: {one.what}; recover again when it "
                        "has returned, or end it and make a group of new actors"
                    )
                time.sleep(REST_POLL_S)

    def close(self) -> None:
        """Tears every graph down within the teardown deadline."""
        self._teardown()
        self._entries.clear()

    def _compile(self, entry: AddedPhase) -> list[Compiled]:
        try:
            return self._compile_with(self.options.executor, entry)
        except (RayError, RuntimeError, ValueError, TimeoutError) as error:
            if self.options.executor == "eager" or self.options.fallback == "error":
                raise RunError(
                    f"phase {entry.phase.name!r} could not be compiled: {error}. Set executor: eager, or fallback: eager"
                ) from error
            logger.warning("phase %r could not be compiled and runs eagerly: %s", entry.phase.name, error)
            return self._compile_with("eager", entry)

    def _compile_with(self, name: str, entry: AddedPhase) -> list[Compiled]:
        if name not in self._executors:
            self._executors[name] = executor_of(name, self.options.engine)
        limits = replace(entry.limits, may_kill=all(group.owned for group in entry.groups.values()))
        return compile_phase(
            self._executors[name],
            entry.graph,
            self.groups,
            self._tickets.counters,
            limits,
            [graph.shard for graph in entry.compiled],
        )

    def _submit(
        self,
        entry: AddedPhase,
        value: object,
        *,
        warmup: bool,
        deadline_s: float,
        rows: Sequence[npt.NDArray[np.intp]] | None = None,
    ) -> Replay:
        """Starts a replay. With `max_in_flight` under way, waits for the oldest first."""
        while True:
            with self._lock:
                broken = next((self._broken[role] for role in entry.phase.roles if role in self._broken), None)
                if broken is not None:
                    advice = f"{broken.breaks}; call scheduler.recover() after the workers are whole again"
                    raise PhaseError(broken.failures, advice, broken.breaks)
                if not entry.compiled:  # another thread tore it down
                    raise RunError(f"phase {entry.phase.name!r} is not compiled; call scheduler.compile() first")
                under_way = tuple(entry.in_flight.replays)  # other threads may read their results at any time
                if len(under_way) < entry.limits.max_in_flight:
                    return self._start(entry, value, warmup, deadline_s, rows)
            entry.in_flight.finish(under_way[0])  # without the lock: meanwhile other phases and threads may start replays

    def _start(
        self, entry: AddedPhase, value: object, warmup: bool, deadline_s: float, rows: Sequence[npt.NDArray[np.intp]] | None
    ) -> Replay:
        """Takes the tickets of a replay and sends it. The caller holds the scheduler's lock."""
        values, join, bucket, padding = entry.share_out(value, rows)
        entry.check_sizes(values)
        number, submitted = entry.replays, []
        try:
            tickets = [self._tickets.take(graph.workers) for graph in entry.compiled]
            for graph, mine, item in zip(entry.compiled, tickets, values, strict=True):
                packet = Packet(Header(entry.phase.name, number, warmup, mine, deadline_s), item)
                submitted.append((graph, graph.submit(packet)))
            deadline = time.monotonic() + deadline_s
            hang_s = math.inf if warmup else entry.durations.hang_s(bucket)
            pending = PendingReplay(
                entry.phase.name,
                number,
                submitted,
                entry.groups,
                deadline,
                self.options.grace_s,
                self.options.section,
                hang_s,
            )
            shards = [graph.shard for graph in entry.compiled]
            measured = partial(entry.durations.add, bucket) if not warmup else lambda busy_s: None
            replay = Replay(pending, entry.in_flight, shards, join, padding, measured)
            entry.replays += 1
            entry.in_flight.replays.append(replay)
        except BaseException as error:  # some workers have their ticket; others would wait for theirs forever
            text = f"replay {number} of phase {entry.phase.name!r} could not be sent to all its workers: {error}"
            entry.in_flight.break_roles(PhaseError((), breaks=text))
            raise
        return replay

    def _parts_of(self, phase: Phase, codec: Codec | None, value: object) -> Sequence[object]:
        """Returns what each shard gets of an input that is no batch."""
        if codec is None or value is None:
            return [value]
        return codec.parts(phase.name, value, math.gcd(*[self.groups[role].layout.dp for role in phase.roles]))

    def _teardown(self, ends: Callable[[Compiled], bool] = lambda graph: True, roles: Collection[str] | None = None) -> None:
        """Tears down the graphs on these roles (None: all) that `ends` selects, and fails their phases' replays under way.

        `ends` must select every graph that has not ended a replay: no later replay could read past its results.
        """
        with self._lock:
            roles = self.groups if roles is None else roles
            entries = [entry for entry in self._entries.values() if set(entry.phase.roles) & set(roles)]
            if any(entry.in_flight.replays for entry in entries):  # loops that wait for a ticket would block the teardown
                for role in roles:
                    self.groups[role].pass_tickets(self._tickets.of(role))
            for replay in [replay for entry in entries for replay in entry.in_flight.replays]:
                text = f"phase {replay.phase!r}, replay {replay.number} was under way when its graphs were torn down"
                replay.fail(PhaseError((), f"{text}; replay it again"))
            ended = [graph for entry in entries for graph in entry.compiled if ends(graph)]
            with ThreadPoolExecutor(max(1, len(ended)), thread_name_prefix="teardown") as threads:
                list(threads.map(lambda graph: graph.executable.teardown(self.options.teardown_s), ended))
            for entry in entries:
                entry.compiled = [graph for graph in entry.compiled if graph not in ended]
                entry.in_flight.replays.clear()


def channel_bytes(
    phase: Phase,
    buckets: Sequence[Bucket],
    scalars: Mapping[str, Scalar] | None = None,
    warmup_values: Sequence[object] = (None,),
) -> int:
    """Returns the room for one shard's input in its channel: that of the largest warm-up input."""
    samples: Sequence[object] = [encoded(value) for value in warmup_values]
    if phase.inputs is not None:
        samples = [empty_batch(phase.inputs, bucket, scalars) for bucket in buckets]
    return max(map(payload_bytes, samples)) + 2 * ENVELOPE_BYTES
