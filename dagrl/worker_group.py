"""WorkerGroup: the actors of one role in a `ParallelLayout`; made from a configuration, or around existing actors."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dagrl import errors
from dagrl.deadline import Deadline
from dagrl.errors import DeadlineError, LayoutError, UserError, WorkerError, WorkerFailure, cause_first, error_text
from dagrl.executors.node import DIED, NO_ANSWER, NodeRun, Report, drain_runs, install, report, reset_tickets, where
from dagrl.graph import SHARED_MEMORY
from dagrl.layout import ParallelLayout
from dagrl.phase import Role, group_transports, is_of_async, methods_of, of_async
from dagrl.ports import reserve_port
from dagrl.worker import WorkerContext

logger = logging.getLogger(__name__)

POLL_S = 0.2
"""How often a wait for workers that start looks whether it is still wanted."""

GRACE_S = 3.0
"""After a worker failed in a plain call, or broke a graph, how long to wait for what the others say of theirs."""

HEALTH = "dagrl_health"
"""Concurrency group, one thread, on which a worker answers while its other threads are busy."""


class GpuBundles:
    """Whole GPUs reserved from Ray, each to be shared by the workers of equal rank of several groups."""

    def __init__(self, count: int, timeout_s: float) -> None:
        from ray.util.placement_group import placement_group

        self._group = placement_group([{"GPU": 1.0}] * count, strategy="PACK")
        if not self._group.wait(timeout_s):
            self.release()
            raise DeadlineError(
                f"Ray had no {count} GPUs free within timeouts.start_s = {timeout_s:g} s; choose smaller layouts, or wait"
            )

    def of(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """Where the worker of `rank` goes."""
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)

    def release(self) -> None:
        """Give the GPUs back."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)


@dataclass(frozen=True)
class Resources:
    """What one worker asks of Ray, from `bundles` if there are. `graphs`: compiled graphs that can live on it at once."""

    num_cpus: float = 0
    num_gpus: float = 0
    graphs: int = 12
    bundles: GpuBundles | None = None

    def options(self, rank: int) -> dict[str, Any]:
        """Options of the actor of `rank`."""
        return {"name": None} if self.bundles is None else {"name": None, "scheduling_strategy": self.bundles.of(rank)}


@dataclass(frozen=True)
class Place:
    """Where a worker runs."""

    host: str
    pid: int
    node: str  # of Ray


class WorkerGroup:
    """The actors of one role. Build it with `create` or `from_actors`; end it with `shutdown` if it was created."""

    def __init__(
        self,
        role: Role,
        actors: Sequence[ActorHandle],
        *,
        owned: bool,
        deadline: Deadline,
        health_group: str | None,
        while_waiting: Callable[[], None] | None = None,
    ) -> None:
        self.role = role
        self.layout = role.layout
        self.actors = tuple(actors)
        self._owned = owned
        self._deadline = deadline
        self._health_group = health_group
        self._while_waiting = while_waiting
        self.places: tuple[Place, ...] = ()
        self._late_runs: list[tuple[Any, ...]] = [()] * len(self.actors)
        installs = [
            actor.__ray_call__.remote(install, role.name, rank, str(self.layout.coordinates(rank)))
            for rank, actor in enumerate(self.actors)
        ]
        self.wait(installs, deadline, "start")
        self.places = tuple(Place(*place) for place in self.call_function(where))

    @classmethod
    def create(
        cls,
        role: str,
        worker_class: type,
        layout: ParallelLayout,
        config: object,
        *,
        resources: Resources | None = None,
        seed: int = 0,
        start_timeout_s: float = 180.0,
        collective_timeout_s: float = 60.0,
        while_waiting: Callable[[], None] | None = None,
    ) -> WorkerGroup:
        """Start one actor a rank, construct `worker_class(context, config)` in each, and set all of them up at once.

        `while_waiting` is called now and then until all are set up, and may raise to give up. Raises what a worker's
        constructor or `setup` raised, with its rank; DeadlineError after the deadline. Nothing is left running then.
        """
        resources = resources or Resources()
        environment = worker_class.environment(config) if hasattr(worker_class, "environment") else {}
        actor_class = ray.remote(
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
            max_restarts=0,
            concurrency_groups={"_ray_system": resources.graphs, HEALTH: 1},
            runtime_env={"env_vars": environment},
        )(worker_class)
        contexts = [WorkerContext(role, rank, layout, seed, collective_timeout_s) for rank in range(layout.world_size)]
        actors = [actor_class.options(**resources.options(context.rank)).remote(context, config) for context in contexts]
        traced = Role(role, layout, methods_of(worker_class), group_transports(resources.num_gpus))
        try:
            group = cls(
                traced,
                actors,
                owned=True,
                deadline=Deadline(start_timeout_s, "timeouts.start_s"),
                health_group=HEALTH,
                while_waiting=while_waiting,
            )
            group.setup()
            group._while_waiting = None
        except BaseException:
            for actor in actors:
                ray.kill(actor)
            raise
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
        """A group around actors that somebody else made, in the layout's rank order. They are never set up or killed here.

        Several phases can be compiled on them if they were made with `concurrency_groups={"_ray_system": n}`, n phases, and
        of a class without `async` methods; such methods cannot be nodes. Their nodes run one at a time, whatever threads
        (`max_concurrency`) they have.
        `health_group` names one more of their concurrency groups, on which nothing else runs: without it they say what they
        are running, and break their collectives when a peer failed, only when their main thread is free. An actor belongs
        to one group at a time.
        """
        if len(handles) != layout.world_size:
            raise LayoutError(
                f"layout {layout.describe()} has {layout.world_size} workers, but {len(handles)} actors were given"
            )
        rank_of: dict[object, int] = {}
        for rank, actor in enumerate(handles):
            if (other := rank_of.setdefault(actor._actor_id, rank)) != rank:
                raise LayoutError(f"ranks {other} and {rank} of the role {role!r} are one actor; give each rank its own")
        signatures = handles[0]._ray_method_signatures
        methods = {name: _signature(signature) for name, signature in signatures.items() if not name.startswith("_")}
        traced = Role(role, layout, methods, transports)
        deadline = Deadline(call_timeout_s, "call_timeout_s")
        group = cls(traced, handles, owned=False, deadline=deadline, health_group=health_group)
        known = {name: of_async(methods[name]) for name in group.call_function(_async_methods)[0] if name in methods}
        group.role = dataclasses.replace(traced, methods=methods | known)
        return group

    def setup(self) -> None:
        """Call `setup(address)` on every worker at once, where the worker has it. Also after `abort`, to join again."""
        if "setup" not in self.role.methods:
            return
        self.call("setup", self.call_function(free_address)[0])

    def call(self, method: str, *args: object, deadline: Deadline | None = None) -> list[Any]:
        """Plain actor calls of `method(*args)` on every worker; results in rank order."""
        return self.call_each(method, [args] * len(self.actors), deadline=deadline)

    def call_each(self, method: str, args: Sequence[tuple[object, ...]], *, deadline: Deadline | None = None) -> list[Any]:
        """Plain actor calls of `method`, with arguments of its own for each rank."""
        return call_together([(self, method, args)], deadline=deadline or self._deadline)[0]

    def call_function(self, function: Callable[..., Any], *args: object, deadline: Deadline | None = None) -> list[Any]:
        """Plain actor calls of `function(worker, *args)` in every worker's process."""
        refs = [actor.__ray_call__.remote(function, *args) for actor in self.actors]
        return self.wait(refs, deadline or self._deadline, function.__name__)

    def drain_runs(self, timeout_s: float = 2.0) -> list[list[NodeRun]]:
        """What each worker ran since the last call, for the trace; nothing of one that died.

        Of one that does not answer in time it comes with the next call.
        """
        asked = [(*late, self._health(actor, drain_runs)) for late, actor in zip(self._late_runs, self.actors, strict=True)]
        refs = [ref for of_rank in asked for ref in of_rank]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0])
        self._late_runs = [tuple(ref for ref in of_rank if ref not in ready) for of_rank in asked]
        return [self._drained(rank, [ref for ref in of_rank if ref in ready]) for rank, of_rank in enumerate(asked)]

    def _drained(self, rank: int, answers: Sequence[Any]) -> list[NodeRun]:
        try:
            return [run for runs in ray.get(answers) for run in runs]
        except ray.exceptions.RayActorError:
            logger.debug("%s worker %d died with its part of the trace", self.role.name, rank)
            return []

    def reset_tickets(self, tickets: Sequence[int], deadline: Deadline) -> None:
        """Start each worker's ticket order again at its ticket."""
        refs = [self._health(actor, reset_tickets, ticket) for actor, ticket in zip(self.actors, tickets, strict=True)]
        self.wait(refs, deadline, "reset_tickets")

    def pass_tickets(self, tickets: Sequence[int]) -> None:
        """Have whoever waits for a turn before these give up; nobody waits for an answer."""
        for actor, ticket in zip(self.actors, tickets, strict=True):
            self._health(actor, reset_tickets, ticket)

    def reports(self, timeout_s: float) -> dict[int, Report]:
        """What the worker of each rank is running."""
        refs = {self._health(actor, report): rank for rank, actor in enumerate(self.actors)}
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
        reports = dict.fromkeys(refs.values(), NO_ANSWER)
        for ref in ready:
            try:
                reports[refs[ref]] = ray.get(ref)
            except ray.exceptions.RayActorError:
                reports[refs[ref]] = DIED
        return reports

    def rank_of_actor(self, actor_id: str) -> int | None:
        """The rank of an actor by its id in hex, or None when it is not of this group."""
        return next((rank for rank, actor in enumerate(self.actors) if actor._actor_id.hex() == actor_id), None)

    def failure(self, rank: int, kind: str, node: str, message: str, traceback: str = "") -> WorkerFailure:
        """A failure of the worker of `rank`, outside of any phase."""
        place = self.places[rank] if self.places else Place("", 0, "")
        coordinates = str(self.layout.coordinates(rank))
        return WorkerFailure(
            self.role.name, rank, coordinates, place.host, place.pid, "", 0, node, kind, message, traceback, time.time_ns()
        )

    def abort(self, ranks: Sequence[int]) -> None:
        """Have workers break their collectives; they answer nothing, and are waited for by nobody."""
        for rank in ranks:
            self._health(self.actors[rank], _abort)

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill workers that do not end by themselves, if this group made them."""
        for rank in ranks if self.owned else ():
            ray.kill(self.actors[rank])

    def shutdown(self, timeout_s: float) -> None:
        """End the workers that this group made: their `shutdown()` within the deadline, then their processes."""
        shutdown_groups([self], timeout_s)

    @property
    def owned(self) -> bool:
        """Whether the group made its workers, and may end them."""
        return self._owned

    def _health(self, actor: ActorHandle, function: Any, *args: object) -> Any:
        call = actor.__ray_call__
        return (call.options(concurrency_group=self._health_group) if self._health_group else call).remote(function, *args)

    def wait(self, refs: Sequence[Any], deadline: Deadline, doing: str) -> list[Any]:
        """Results of one call a rank; the first error, with its rank, as soon as one fails; DeadlineError when late."""
        return _gather([(self, doing, refs)], deadline, self._while_waiting)[0]


def call_together(
    calls: Sequence[tuple[WorkerGroup, str, Sequence[tuple[object, ...]]]], *, deadline: Deadline
) -> list[list[Any]]:
    """Plain actor calls on several groups at once: `(group, method, one tuple of arguments a rank)`.

    For methods that wait for each other across groups. Results are in the order of the calls, then of ranks.
    """
    started = [
        (group, method, [getattr(actor, method).remote(*mine) for actor, mine in zip(group.actors, args, strict=True)])
        for group, method, args in calls
    ]
    return _gather(started, deadline)


def shutdown_groups(groups: Sequence[WorkerGroup], timeout_s: float) -> None:
    """`WorkerGroup.shutdown` of several groups at once."""
    mine = [group for group in groups if group.owned]
    ending = [group for group in mine if "shutdown" in group.role.methods]
    refs = [actor.shutdown.remote() for group in ending for actor in group.actors]
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
    for group in mine:
        group.kill(range(len(group.actors)))


def _gather(
    calls: Sequence[tuple[WorkerGroup, str, Sequence[Any]]],
    deadline: Deadline,
    while_waiting: Callable[[], None] | None = None,
) -> list[list[Any]]:
    callers = {ref: (group, rank, doing) for group, doing, refs in calls for rank, ref in enumerate(refs)}
    until = time.monotonic() + deadline.seconds
    waiting = list(callers)
    results: dict[Any, Any] = {}
    failures: list[WorkerFailure] = []
    while waiting:
        left = max(0.0, until - time.monotonic())
        ready, waiting = ray.wait(waiting, timeout=min(left, POLL_S) if while_waiting else left)
        if while_waiting:
            while_waiting()
        for ref in ready:
            result = _result(ref, *callers[ref])
            if isinstance(result, WorkerFailure):
                failures.append(result)
                until = min(until, time.monotonic() + GRACE_S)
            else:
                results[ref] = result
        if not ready and time.monotonic() >= until:
            break
    if failures:
        raise WorkerError(cause_first(failures))
    if waiting:
        late = [callers[ref] for ref in waiting]
        names = [group.failure(rank, "hung", doing, deadline.missed).describe() for group, rank, doing in late]
        raise DeadlineError("\n".join(names) + f"; raise {deadline.key} if it is only slow")
    return [[results[ref] for ref in refs] for _, _, refs in calls]


def _result(ref: Any, group: WorkerGroup, rank: int, doing: str) -> Any:
    """What the worker returned, or its failure. Raises an error that the user can mend as it is."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as failed:
        if isinstance(failed.cause, UserError):
            raise failed.cause from None
        return group.failure(rank, "raised", doing, error_text(failed.cause), str(failed))
    except ray.exceptions.RayActorError as died:
        if died.actor_init_failed:
            return group.failure(rank, "raised", doing, *_raised_in_constructor(died))
        return group.failure(rank, "died", doing, first_line(died))
    except ray.exceptions.RayError as unread:  # its answer, or its error, cannot be unpickled here
        return group.failure(rank, "raised", doing, f"what came of it cannot be read: {first_line(unread)}", str(unread))


def _raised_in_constructor(died: ray.exceptions.RayActorError) -> tuple[str, str]:
    """What a worker's constructor raised, and its traceback; an error that the user can mend is raised as it is.

    Of an error in an actor's creation Ray keeps the text alone, in colours.
    """
    text = re.sub(r"\x1b\[[\d;]*m", "", str(died)).strip()
    raised = re.split(r'^  File ".*\n(?:    .*\n)*', text, flags=re.MULTILINE)[-1]  # what follows the last frame
    name, _, message = raised.partition(": ")
    kind = getattr(errors, name.removeprefix(f"{errors.__name__}."), None)
    if isinstance(kind, type) and issubclass(kind, UserError):
        raise kind(message)
    return raised, text


def first_line(error: Exception) -> str:
    """Of a message of Ray's, which goes on with advice of its own."""
    return str(error).strip().splitlines()[0]


def _abort(worker: object) -> None:
    """Runs in the worker."""
    abort = getattr(worker, "abort", None)
    if abort is not None:
        abort()


def _async_methods(worker: object) -> list[str]:
    """The names of the worker's `async` methods, which handles of actors do not tell; runs in the worker."""
    return [name for name, signature in methods_of(type(worker)).items() if is_of_async(signature)]


def free_address(worker: object) -> str:
    """`host:port` with a port that is reserved for a store on the worker's host; runs in the worker."""
    return f"{ray.util.get_node_ip_address()}:{reserve_port()}"


def _signature(flat: Sequence[Any]) -> Any:
    import inspect

    return inspect.Signature([parameter for parameter in flat if parameter.name != "self"])
