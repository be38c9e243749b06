"""WorkerGroup: the actors of one role in a `ParallelLayout`, created from a class or wrapped around existing actors."""

from __future__ import annotations

import inspect
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle

from dagrl import errors
from dagrl.attributes import setting
from dagrl.errors import DeadlineError, LayoutError, RunError, UserError, WorkerError, WorkerFailure, cause_first, error_text
from dagrl.runtime.actors import HEALTH, ActorStarter, Resources
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.executors.node import (
    DIED,
    NO_ANSWER,
    EventLoopHere,
    NodeRun,
    Report,
    WorkerLocation,
    abort,
    drain_runs,
    install,
    report,
    reset_tickets,
    where,
)
from dagrl.runtime.graph import SHARED_MEMORY
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Role
from dagrl.runtime.store import reserve_port
from dagrl.runtime.worker import check_worker_class

logger = logging.getLogger(__name__)

POLL_S = 0.2  # interval at which `while_waiting` is called while workers start
GRACE_S = 3.0  # longest wait for other workers' reports after one failed in a plain call, or broke a graph
Failure = Callable[..., WorkerFailure]  # makes a failure of the worker of a rank; `WorkerGroup.failure`

IDLE_POLL_S = 0.1
REPORT_S = 1.0
"""Deadline for a worker to answer before it is asked again with the others."""


class WorkerGroup:
    """The actors of one role. Made by `create` or `from_actors`. Call `shutdown` on a created group."""

    def __init__(
        self,
        role: Role,
        actors: Sequence[ActorHandle],
        *,
        deadline: Deadline,
        starter: ActorStarter | None = None,
        health_group: str | None = None,
        while_waiting: Callable[[], None] | None = None,
    ) -> None:
        self.role = role
        self.layout = role.layout
        self.actors = tuple(actors)
        self.owned = starter is not None  # created its workers, and may end them
        self.out_of_service: set[int] = set()  # ranks of shards that failed, until these have graphs again
        self._deadline = deadline
        self._health_group = health_group
        self._while_waiting = while_waiting
        self._starter = starter
        self.locations: tuple[WorkerLocation, ...] = ()
        self._late_runs: list[tuple[Any, ...]] = [()] * len(self.actors)
        self._install(range(len(self.actors)))

    @classmethod
    def create(
        cls,
        role: str,
        worker_class: type,
        layout: ParallelLayout,
        config: object,
        *,
        protocols: Sequence[type] = (),
        resources: Resources | None = None,
        seed: int = 0,
        start_timeout_s: float = 180.0,
        collective_timeout_s: float = 60.0,
        py_executable: str | None = None,
        while_waiting: Callable[[], None] | None = None,
        before_setup: Callable[[], object] | None = None,
    ) -> WorkerGroup:
        """Start one actor per rank, construct `worker_class(context, config)` in each, and set all of them up at once.

        The class must fit `protocols` (`check_worker_class`). `py_executable`: what Ray runs instead of Python (a key of its
        `runtime_env`). `before_setup` is called when the actors have begun to start and to prepare; it may wait for another
        group. `while_waiting` is called repeatedly until all are set up, and may raise to give up. Raises ConfigError for a
        class that does not fit, before anything starts; what a worker's constructor or `setup` raised, with its rank;
        DeadlineError after the deadline. Leaves nothing running if it raises.
        """
        check_worker_class(worker_class, protocols)
        starter = ActorStarter(
            worker_class, role, layout, config, resources or Resources(), seed, collective_timeout_s, py_executable
        )
        actors = [starter.start(rank) for rank in range(layout.world_size)]
        deadline = Deadline(start_timeout_s, "timeouts.start_s")
        try:
            try:
                group = cls(
                    starter.traced,
                    actors,
                    deadline=deadline,
                    starter=starter,
                    health_group=HEALTH,
                    while_waiting=while_waiting,
                )
            except DeadlineError as late:
                raise DeadlineError(f"{late}{starter.shortage()}") from None
            group.prepare()
            if before_setup is not None:
                before_setup()
            group.setup()
        except BaseException:
            for actor in actors:
                ray.kill(actor)
            raise
        group._while_waiting = None
        return group

    @classmethod
    def from_actors(
        cls,
        handles: Sequence[ActorHandle],
        layout: ParallelLayout,
        role: str = "train",
        *,
        transports: frozenset[str] = frozenset({SHARED_MEMORY}),
        call_timeout_s: float = 60.0,
        health_group: str | None = None,
    ) -> WorkerGroup:
        """Makes a group around existing actors, in the layout's rank order. It never sets them up or kills them.

        The actors may be of any class and made with any options. Nodes of one actor run one at a time, on threads of
        their own however many threads (`max_concurrency`) it has; `async` methods run on its event loop. Plain calls
        (`actor.method.remote()`) run as they do without a group, also while a node runs: one that has returned before
        `replay` comes before it, and one that is sent after `result()` comes after it. `health_group` names one of the
        actors' concurrency groups, which nothing else uses. Without it, the actors report what they run, and abort their
        collectives after a peer's failure, only while their default group is free. An actor may be in several groups,
        one for each of its roles; each phase finds its group by the role's name. `call_timeout_s` limits each plain call
        of all workers. The first waits here until the actors are constructed: raise it if they load a model.
        """
        if len(handles) != layout.world_size:
            raise LayoutError(
                f"layout {layout.describe()} has {layout.world_size} workers, but {len(handles)} actors were given"
            )
        rank_of: dict[object, int] = {}
        for rank, actor in enumerate(handles):
            if (other := rank_of.setdefault(actor._actor_id, rank)) != rank:
                raise LayoutError(f"ranks {other} and {rank} of role {role!r} are the same actor; give each rank its own")
        methods = {
            name: inspect.Signature([one for one in parameters if one.name not in ("self", "_ray_trace_ctx")])
            for name, parameters in handles[0]._ray_method_signatures.items()
            if not name.startswith("__")
        }
        deadline = Deadline(call_timeout_s, "call_timeout_s of WorkerGroup.from_actors")
        try:
            group = cls(Role(role, layout, methods, transports), handles, deadline=deadline, health_group=health_group)
        except DeadlineError as late:
            raise DeadlineError(f"{late}. Ray starts an actor once the CPUs and GPUs that it asks for are free") from None
        if health_group is not None and group.reports(call_timeout_s, [0])[0] is DIED:  # Ray ends actors without that group
            raise WorkerError(
                (group.failure(0, "died", "report", f"it was called in the concurrency group {health_group!r}"),),
                f"Make the actors by ray.remote(concurrency_groups={{{health_group!r}: 1}}), or leave out health_group",
            )
        return group

    def start_again(self, ranks: Sequence[int]) -> None:
        """Kills the workers of `ranks` and starts new ones. Does not wait for them; `join_again` does.

        Raises RunError for a group around existing actors: make a group of new actors and the others, and a new Scheduler.
        """
        if self._starter is None:
            raise RunError(
                f"the {self.role.name} group did not create its workers and cannot start them again; make a group of new "
                "actors and the remaining ones, WorkerGroup.from_actors(...), and a new Scheduler"
            )
        self.kill(ranks)
        actors = list(self.actors)
        for rank in ranks:
            actors[rank] = self._starter.start(rank)
            self._late_runs[rank] = ()
        self.actors = tuple(actors)
        self.prepare(ranks)

    def join_again(self, ranks: Sequence[int], setup: Sequence[int] | None = None) -> None:
        """Makes workers that `start_again` started ready for graphs, and sets those of `setup` up again (None: all).

        Call `Scheduler.recover` next: it compiles the graphs of these workers and leaves the others.
        """
        self._install(ranks)
        self.setup(setup)

    def _install(self, ranks: Sequence[int]) -> None:
        """Prepares new workers for graphs, and finds out where they run."""
        installs = [
            actor.__ray_call__.remote(install, self.role.name, rank, str(self.layout.coordinates(rank)), EventLoopHere())
            if rank in ranks
            else None
            for rank, actor in enumerate(self.actors)
        ]
        self.wait(installs, self._deadline, "start")
        self.locations = tuple(self.call_function(where))

    def waiting(self, while_waiting: Callable[[], None]) -> AbstractContextManager[None]:
        """Makes waits of plain calls inside the block call `while_waiting` repeatedly, which may raise to give up."""
        return setting(self, _while_waiting=while_waiting)

    def prepare(self, ranks: Sequence[int] | None = None) -> None:
        """Lets workers (None: all) `prepare` for `setup`, if the class has that. Does not wait; `setup` comes after it."""
        if "prepare" in self.role.methods:
            for rank in range(len(self.actors)) if ranks is None else ranks:
                self.actors[rank].prepare.remote()

    def setup(self, ranks: Sequence[int] | None = None) -> None:
        """Calls `setup(address)` on workers (None: all) at once, if the class has it. Also rejoins a group after `abort`.

        The address is on the first worker's host; that of the shard's first worker for a class with `meets_by_shard`.
        """
        if "setup" not in self.role.methods:
            return
        addresses = self.call_function(free_address)
        by_shard = self._starter is not None and getattr(self._starter.worker_class, "meets_by_shard", False)
        hosts = [self.layout.shard(self.layout.coordinates(rank).dp)[0] if by_shard else 0 for rank in range(len(addresses))]
        refs = [
            actor.setup.remote(addresses[host]) if ranks is None or rank in ranks else None
            for rank, (actor, host) in enumerate(zip(self.actors, hosts, strict=True))
        ]
        self.wait(refs, self._deadline, "setup")

    def call(self, method: str, *args: object, deadline: Deadline | None = None) -> list[Any]:
        """Calls `method(*args)` on every worker and returns the results in rank order; None for those out of service."""
        refs = [
            None if rank in self.out_of_service else getattr(actor, method).remote(*args)
            for rank, actor in enumerate(self.actors)
        ]
        return self.wait(refs, deadline or self._deadline, method)

    def call_function(self, function: Callable[..., Any], *args: object, deadline: Deadline | None = None) -> list[Any]:
        """Calls `function(worker, *args)` in every worker's process and returns the results in rank order."""
        refs = [actor.__ray_call__.remote(function, *args) for actor in self.actors]
        return self.wait(refs, deadline or self._deadline, function.__name__)

    def drain_runs(self, timeout_s: float = 2.0) -> list[list[NodeRun]]:
        """Returns what each worker ran since the last call; nothing for a dead one. Late answers come with the next call."""
        asked = [
            (*late, self._health(actor, drain_runs, self.role.name))
            for late, actor in zip(self._late_runs, self.actors, strict=True)
        ]
        refs = [ref for of_rank in asked for ref in of_rank]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0])
        self._late_runs = [tuple(ref for ref in of_rank if ref not in ready) for of_rank in asked]
        return [self._drained(rank, [ref for ref in of_rank if ref in ready]) for rank, of_rank in enumerate(asked)]

    def _drained(self, rank: int, answers: Sequence[Any]) -> list[NodeRun]:
        try:
            return [run for runs in ray.get(answers) for run in runs]
        except ray.exceptions.RayActorError:
            logger.debug("%s worker %d died; its part of the trace is lost", self.role.name, rank)
            return []

    def reset_tickets(self, tickets: Sequence[int], deadline: Deadline) -> None:
        """Sets the next ticket of each worker, except those out of service."""
        refs = [
            None if rank in self.out_of_service else self._health(actor, reset_tickets, ticket)
            for rank, (actor, ticket) in enumerate(zip(self.actors, tickets, strict=True))
        ]
        self.wait(refs, deadline, "reset_tickets")

    def pass_tickets(self, tickets: Sequence[int]) -> None:
        """Makes runs that wait for a turn before these tickets give up. Does not wait for an answer."""
        for actor, ticket in zip(self.actors, tickets, strict=True):
            self._health(actor, reset_tickets, ticket)

    def reports(self, timeout_s: float, ranks: Collection[int] | None = None) -> dict[int, Report]:
        """Returns what the worker of each rank (None: of all) runs."""
        asked = range(len(self.actors)) if ranks is None else ranks
        refs = {self._health(self.actors[rank], report): rank for rank in asked}
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
        reports = dict.fromkeys(refs.values(), NO_ANSWER)
        for ref in ready:
            try:
                reports[refs[ref]] = ray.get(ref)
            except ray.exceptions.RayActorError:
                reports[refs[ref]] = DIED
        return reports

    @property
    def answers_while_busy(self) -> bool:
        """Whether a worker says what it runs while it runs something."""
        return self._health_group is not None

    def rank_of_actor(self, actor_id: str) -> int | None:
        """Returns the rank of an actor by its id in hex, or None if it is not in this group."""
        return next((rank for rank, actor in enumerate(self.actors) if actor._actor_id.hex() == actor_id), None)

    def failure(self, rank: int, kind: str, node: str, message: str, traceback: str = "") -> WorkerFailure:
        """Returns a failure of the worker of `rank`, outside any phase."""
        place = self.locations[rank] if self.locations else WorkerLocation("", 0, "")
        coordinates = str(self.layout.coordinates(rank))
        return WorkerFailure(
            self.role.name, rank, coordinates, place.host, place.pid, "", 0, node, kind, message, traceback, time.time_ns()
        )

    def abort(self, ranks: Sequence[int]) -> None:
        """Makes workers abort their collectives. Does not wait for them."""
        for rank in ranks:
            self._health(self.actors[rank], abort)

    def kill(self, ranks: Sequence[int]) -> None:
        """Kills workers that do not end by themselves, if this group created them."""
        for rank in ranks if self.owned else ():
            ray.kill(self.actors[rank])

    def shutdown(self, timeout_s: float) -> None:
        """Calls `shutdown()` of the workers that this group created, within the deadline, then kills their processes."""
        shutdown_groups([self], timeout_s)

    def _health(self, actor: ActorHandle, function: Any, *args: object) -> Any:
        call = actor.__ray_call__
        return (call.options(concurrency_group=self._health_group) if self._health_group else call).remote(function, *args)

    def wait(self, refs: Sequence[Any], deadline: Deadline, doing: str) -> list[Any]:
        """Returns the results of one call per rank. Raises the first error with its rank, at once; DeadlineError if late."""
        return gather([(self.failure, doing, refs)], deadline, self._while_waiting)[0]


Groups = Mapping[str, WorkerGroup]  # worker groups by role


def call_together(
    calls: Sequence[tuple[WorkerGroup, str, Sequence[tuple[object, ...]]]], *, deadline: Deadline
) -> list[list[Any]]:
    """Calls methods on several groups at once: `(group, method, one tuple of arguments per rank)`.

    For methods that wait for each other across groups. Returns results in the order of the calls, then of the ranks.
    """
    started = [
        (
            group.failure,
            method,
            [getattr(actor, method).remote(*mine) for actor, mine in zip(group.actors, args, strict=True)],
        )
        for group, method, args in calls
    ]
    return gather(started, deadline)


def shutdown_groups(groups: Sequence[WorkerGroup], timeout_s: float) -> None:
    """Calls `shutdown()` of the workers that these groups created, within the deadline, then kills their processes."""
    owned = [group for group in groups if group.owned]
    refs = [actor.shutdown.remote() for group in owned if "shutdown" in group.role.methods for actor in group.actors]
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
    for group in owned:
        for actor in group.actors:
            ray.kill(actor)


def free_address(worker: object) -> str:
    """Returns `host:port` on the worker's host, with a port reserved for a rendezvous. Runs in the worker."""
    return f"{ray.util.get_node_ip_address()}:{reserve_port()}"


def gather(
    calls: Sequence[tuple[Failure, str, Sequence[Any]]], deadline: Deadline, while_waiting: Callable[[], None] | None = None
) -> list[list[Any]]:
    """Returns the results of calls, one reference for each rank, with their names; None for a rank that was not called.

    `while_waiting` is called repeatedly and may raise to give up. Raises WorkerError with all that failed, as soon as one
    has and the others had time to report; a UserError unchanged, unless a worker died; DeadlineError if late.
    """
    asked = [(ref, (failure, rank, doing)) for failure, doing, refs in calls for rank, ref in enumerate(refs)]
    callers = {ref: caller for ref, caller in asked if ref is not None}
    until = time.monotonic() + deadline.seconds
    waiting = list(callers)
    results: dict[Any, Any] = {}
    failures: list[WorkerFailure] = []
    refusals: list[UserError] = []
    while waiting:
        left = max(0.0, until - time.monotonic())
        ready, waiting = ray.wait(waiting, timeout=min(left, POLL_S) if while_waiting else left)
        if while_waiting:
            while_waiting()
        for ref in ready:
            try:
                result = _result(ref, *callers[ref])
            except UserError as error:
                refusals.append(error)
                until = min(until, time.monotonic() + GRACE_S)
                continue
            if isinstance(result, WorkerFailure):
                failures.append(result)
                until = min(until, time.monotonic() + GRACE_S)
            else:
                results[ref] = result
        if not ready and time.monotonic() >= until:
            break
    if refusals and not any(failure.kind == "died" for failure in failures):  # a death may be why others refused
        raise refusals[0]
    if failures:
        raise WorkerError(cause_first(failures))
    if waiting:
        late = [callers[ref] for ref in waiting]
        names = [failure(rank, "is still", doing, deadline.missed).describe() for failure, rank, doing in late]
        raise DeadlineError("\n".join(names) + f"; raise {deadline.key} if it is slow")
    return [[None if ref is None else results[ref] for ref in refs] for _, _, refs in calls]


def _result(ref: Any, failure: Failure, rank: int, doing: str) -> Any:
    """Returns the worker's result, or its failure. Raises UserErrors unchanged."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as failed:
        if isinstance(failed.cause, UserError):
            raise failed.cause from None
        return failure(rank, "raised", doing, error_text(failed.cause), str(failed))
    except ray.exceptions.RayActorError as died:
        if died.actor_init_failed:
            return failure(rank, "raised", doing, *_raised_in_constructor(died))
        return failure(rank, "died", doing, first_line(died))
    except ray.exceptions.RayError as unread:  # its result or error cannot be unpickled here
        return failure(rank, "raised", doing, f"its result cannot be read: {first_line(unread)}", str(unread))


def _raised_in_constructor(died: ray.exceptions.RayActorError) -> tuple[str, str]:
    """Returns what a worker's constructor raised, and its traceback. Raises UserErrors unchanged.

    For an error while an actor is created, Ray keeps only coloured text.
    """
    text = re.sub(r"\x1b\[[\d;]*m", "", str(died)).strip()
    raised = re.split(r'^  File ".*\n(?:    .*\n)*', text, flags=re.MULTILINE)[-1]  # the text after the last frame
    name, _, message = raised.partition(": ")
    kind = getattr(errors, name.removeprefix(f"{errors.__name__}."), None)
    if isinstance(kind, type) and issubclass(kind, UserError):
        raise kind(message)
    return raised, text


def first_line(error: Exception) -> str:
    """Returns the first line of an error of Ray's, without Ray's advice."""
    return str(error).strip().splitlines()[0]


@dataclass(frozen=True)
class Revival:
    """The numbers of workers of a group that kept their processes, and that are new."""

    kept: int
    started: int

    def __str__(self) -> str:
        return f"{self.kept} workers kept their process, {self.started} new ones were started"


def revive(group: WorkerGroup, lost: Collection[int] | None = None, *, rest_s: float) -> Revival:
    """Sets all workers of a group up again; none may have a graph. Afterwards they are as after `WorkerGroup.create`.

    A worker keeps its process if it is idle within `rest_s` and its `reset` returns true in that time. With `lost`, only the
    shards of these workers are made whole, and the others may run. Raises what `setup` raises, and DeadlineError if a new
    process takes longer than the group's start may.
    """
    shards = range(group.layout.dp) if lost is None else sorted({group.layout.coordinates(rank).dp for rank in lost})
    ranks = [rank for shard in shards for rank in group.layout.shard(shard)]
    if lost is None:
        group.out_of_service.clear()
    dead = [rank for rank, report in group.reports(REPORT_S, ranks).items() if report is DIED or rank in (lost or ())]
    group.start_again(dead)  # at once: their imports take the longest
    others = [rank for rank in ranks if rank not in dead]
    kept = _reset(group, idle_ranks(group, rest_s, others), rest_s)
    stuck = [rank for rank in others if rank not in kept]
    group.start_again(stuck)
    group.join_again([*dead, *stuck], ranks)
    return Revival(len(kept), len(dead) + len(stuck))


def idle_ranks(group: WorkerGroup, rest_s: float, ranks: Collection[int] | None = None) -> list[int]:
    """Returns those of `ranks` (None: all) whose workers live and run nothing, as soon as none runs, or after `rest_s`."""
    until = time.monotonic() + rest_s
    while True:
        reports = group.reports(max(0.0, until - time.monotonic()), ranks)
        alive = [rank for rank in reports if reports[rank].what not in (DIED.what, NO_ANSWER.what)]
        idle = [rank for rank in alive if not reports[rank].what]
        if idle == alive or time.monotonic() >= until:
            return idle
        time.sleep(IDLE_POLL_S)


def _reset(group: WorkerGroup, ranks: list[int], rest_s: float) -> set[int]:
    """Returns the ranks whose `reset` returned true within `rest_s`."""
    if "reset" not in group.role.methods:
        return set()
    asked: dict[Any, int] = {group.actors[rank].reset.remote(): rank for rank in ranks}
    ready = ray.wait(list(asked), num_returns=len(asked), timeout=rest_s)[0] if asked else []
    return {asked[ref] for ref in ready if _returned_true(ref)}


def _returned_true(ref: Any) -> bool:
    try:
        return bool(ray.get(ref))
    except ray.exceptions.RayError as error:
        logger.info("a worker could not be reset, and its process is replaced: %s", first_line(error))
        return False
