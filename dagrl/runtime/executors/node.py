"""The worker's side of a replay: runs one node of a graph on a worker, in ticket order.

These functions run inside actors through Ray's generic `__ray_call__`, so a worker may be of any class with the methods
that phases name. A `NodeState` holds what a worker's process remembers between nodes.
"""

import asyncio
import copy
import inspect
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray

from dagrl.errors import DeadlineError, RunError, WorkerFailure, error_text, printable
from dagrl.machine import starved_s
from dagrl.runtime.edges.packet import ENVELOPE_BYTES, FAILURE_CHARACTERS, Packet, fit_failures, payload_bytes
from dagrl.runtime.edges.pickling import Encoded, Shares, accelerator_tensors
from dagrl.runtime.graph import Arguments
from dagrl.runtime.passes import RELAY
from dagrl.runtime.worker import ReplayContext, replay_context

logger = logging.getLogger(__name__)

TRACE_CAPACITY = 65_536  # node runs kept on a worker until the driver drains them; older ones are dropped


class ResultTooLargeError(RunError):
    """The result does not fit its channel."""


@dataclass(frozen=True)
class Take:
    """One argument of a node's method: the value of input `index`.

    `flatten`: the value is a list, whose items go into the node's own list.
    """

    index: int
    flatten: bool = False

    def of(self, value: Any, position: int) -> object:
        """Returns the argument of the worker at `position`, given the input's value."""
        kind = type(value)
        if kind is Shares:
            return value.parts[position].load()
        return value.load() if kind is Encoded else value


@dataclass(frozen=True)
class NodeCall:
    """The constant part of one node, fixed when the graph is compiled."""

    role: str
    label: str
    position: int  # of the worker in its graph
    kind: str
    method: str
    args: tuple[object, ...]  # a `Take`, or else a constant
    constants: dict[str, object]
    place: int  # among the worker's nodes in this graph, from 0: the node waits for its ticket and earlier places
    closes_turn: bool  # the worker's last node in this graph: lets the next ticket in
    result_limit: int  # bytes
    result_key: str  # the setting to raise if they are too few
    accelerated: bool = False  # tensors of the result go from GPU to GPU
    in_order: bool = True  # its worker runs nodes in order: earlier ones have ended or will never come
    copied: tuple[str, ...] = ()  # constants that the method could change: it gets copies
    keywords: tuple[str, ...] = ()  # names of the last arguments
    number: int = 0  # of the node in its graph


class NodeRun(NamedTuple):
    """One run of a node, for the trace; times in nanoseconds since the epoch."""

    phase: str
    replay: int
    warmup: bool
    label: str
    start_ns: int
    end_ns: int


class TicketGate:
    """Runs the nodes of one worker one at a time, whatever threads they arrive on.

    Nodes run in the order of their replays' tickets, and the nodes of one ticket in the order of their places, from 0.
    """

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._next = (0, 0)  # ticket and place
        self._waiting = 0
        self._given_up: set[int] = set()  # tickets whose wait timed out; their remaining nodes are skipped

    def enter(self, ticket: int, place: int, deadline_s: float, in_order: bool = False) -> None:
        """Waits until this place of `ticket` is next (`in_order`: any place of it). The caller then calls `leave`.

        Raises DeadlineError after `deadline_s`, or at once if another place of the ticket timed out; RunError if the place
        has passed.
        """
        mine = (ticket, place)
        if self._next == mine:  # only this node can move it on
            return
        least = (ticket, 0) if in_order else mine
        with self._moved:
            self._waiting += 1
            came = self._moved.wait_for(lambda: self._next >= least or self._is_lost(ticket), timeout=deadline_s)
            self._waiting -= 1
            if not least <= self._next <= mine:
                raise self._error(ticket, place, None if came else deadline_s)
            self._next = mine

    def leave(self, ticket: int, place: int, closes: bool) -> None:
        """Lets the next place in, or (`closes`) the next ticket. Does nothing if a reset let another place in."""
        with self._moved:
            if self._next != (ticket, place):
                return
            self._next = (ticket + 1, 0) if closes else (ticket, place + 1)
            while self._next[0] in self._given_up:
                self._next = (self._next[0] + 1, 0)
            if self._waiting:
                self._moved.notify_all()

    def reset(self, ticket: int) -> None:
        """Makes `ticket` the next one, after a failure."""
        with self._moved:
            self._next = (ticket, 0)
            self._given_up.clear()
            self._moved.notify_all()

    def _is_lost(self, ticket: int) -> bool:
        """Returns whether the turn of `ticket` will never come. One that has begun goes on to the next node that gave up."""
        return ticket in self._given_up and self._next[0] < ticket

    def _error(self, ticket: int, place: int, waited_s: float | None) -> DeadlineError | RunError:
        """Returns why a node is not let in. If it waited until its deadline, gives up the rest of its ticket."""
        inside, before = self._next
        if waited_s is not None:
            self._given_up.add(ticket)
            self._moved.notify_all()
            running = f"ticket {inside} is running" if inside != ticket else f"node {before} of it had not ended"
            return DeadlineError(f"waited {waited_s:.0f} s for ticket {ticket}, while {running}")
        if ticket in self._given_up:
            return DeadlineError(f"the turn of ticket {ticket} did not come in time")
        return RunError(
            f"node {place} of ticket {ticket} arrived when node {before} of ticket {inside} was next; "
            "recompile the graphs of this group"
        )


Run = tuple[str, int, bool, str, int, int]
"""The fields of a `NodeRun`. Named tuples take ten times as long to make as plain ones, and few runs are looked at."""


@dataclass
class Member:
    """A worker as a member of one group, and what it ran as such."""

    role: str
    rank: int
    coordinates: str
    runs: deque[Run] = field(default_factory=lambda: deque(maxlen=TRACE_CAPACITY))


@dataclass
class NodeState:
    """The runtime's state in a worker's process. The groups that it is in share one order of turns."""

    members: dict[str, Member] = field(default_factory=dict)  # by role
    gate: TicketGate = field(default_factory=TicketGate)
    activity: tuple[str, str, int, str, int, float] | None = None
    """Role, phase, replay, label, thread and start of what is running."""
    coroutine: Future[Any] | None = None  # the coroutine that the running node waits for
    event_loop: asyncio.AbstractEventLoop | None = None  # on which Ray runs the actor's `async` methods


_STATE = "_dagrl_node_state"


class EventLoopHere:
    """Unpickles as the event loop that runs there; as None if there is none.

    Ray unpickles the arguments of an actor's calls on its event loop if its class has `async` methods.
    """

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _running_event_loop, ()


def _running_event_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def install(
    worker: object,
    role: str,
    rank: int,
    coordinates: str,
    event_loop: EventLoopHere | asyncio.AbstractEventLoop | None = None,
) -> None:
    """Prepares a worker for graphs. Called when a group of it is made, with an `EventLoopHere`."""
    state = getattr(worker, _STATE, None) or NodeState()
    setattr(worker, _STATE, state)
    state.members[role] = Member(role, rank, coordinates)
    state.event_loop = event_loop if isinstance(event_loop, asyncio.AbstractEventLoop) else None


def state_of(worker: object) -> NodeState:
    """Returns the worker's runtime state. Raises RunError if Ray restarted the worker in its actor."""
    try:
        state = getattr(worker, _STATE)
    except AttributeError:
        raise RunError(
            "Ray restarted this worker after its actor joined a group (max_restarts); make a new WorkerGroup of the actors, "
            "and a new Scheduler"
        ) from None
    assert isinstance(state, NodeState)
    return state


def run_node(worker: object, call: NodeCall, *packets: Packet) -> Packet:
    """Runs one node on `worker`. Its failures, and those of the nodes before it, are in the packet that it returns."""
    if call.kind == RELAY:
        return packets[0]
    state = state_of(worker)
    header = packets[0].header
    ticket = 0
    failures: tuple[WorkerFailure, ...] = ()
    busy_s = 0.0
    for packet in packets:
        if packet.busy_s > busy_s:
            busy_s = packet.busy_s
        if packet.failures:
            failures += tuple(failure for failure in packet.failures if failure not in failures)
    value: object = None
    started = 0.0
    try:
        ticket = header.ticket(call.role, call.position)
        state.gate.enter(ticket, call.place, header.deadline_s, call.in_order)
        started = time.perf_counter()
        if not failures:
            value = _call(worker, state, call, packets)
            _check_size(call, value)
    except ResultTooLargeError as error:  # the work is done and no peer waits: nothing to abort
        value, failures = None, (_failure(state, call, packets[0], error),)
    except BaseException as error:  # the driver must know of any error, and no peer may wait for this worker
        value, failures = None, (_failure(state, call, packets[0], error),)
        if started:  # without a turn, another phase is running on this worker and must not be aborted
            _abort(worker)
    finally:
        if started:
            state.gate.leave(ticket, call.place, call.closes_turn)
    failures = fit_failures(failures, call.result_limit - ENVELOPE_BYTES) if failures else ()
    return Packet(header, value, busy_s + (time.perf_counter() - started if started else 0.0), failures)


def _call(worker: object, state: NodeState, call: NodeCall, packets: tuple[Packet, ...]) -> object:
    header = packets[0].header
    start_ns = time.time_ns()
    state.activity = (call.role, header.phase, header.replay, call.label, threading.get_ident(), time.monotonic())
    try:
        with replay_context(ReplayContext(*header[:3])):
            value = _evaluate(worker, call, packets)
    finally:
        state.activity = None
    state.members[call.role].runs.append((header.phase, header.replay, header.warmup, call.label, start_ns, time.time_ns()))
    return value


def _check_size(call: NodeCall, value: object) -> None:
    needed = payload_bytes(value) + ENVELOPE_BYTES
    if call.accelerated:  # tensors on the GPU do not use the channel
        needed -= sum(map(payload_bytes, accelerator_tensors(value)))
    if needed > call.result_limit:
        raise ResultTooLargeError(
            f"the result of {call.label} needs {needed} bytes, but its channel has room for {call.result_limit}; "
            f"raise {call.result_key} to at least {needed}"
        )


def _evaluate(worker: object, call: NodeCall, packets: tuple[Packet, ...]) -> object:
    args: list[object] = []
    for arg in call.args:
        if not isinstance(arg, Take):
            args.append(copy.deepcopy(arg) if isinstance(arg, list | dict) else arg)
        elif arg.flatten:
            collected = packets[arg.index].value
            assert isinstance(collected, list)
            args.extend(collected)
        else:
            args.append(arg.of(packets[arg.index].value, call.position))
    if call.kind == "collect":
        return args
    method = getattr(worker, call.method)
    constants: dict[str, Any] = call.constants
    if call.copied:
        constants = constants | {name: copy.deepcopy(constants[name]) for name in call.copied}
    if call.keywords:
        named = len(args) - len(call.keywords)
        constants = constants | dict(zip(call.keywords, args[named:], strict=True))
        del args[named:]
    if call.kind == "spread":
        if args[0] is None:  # this worker is left out
            return None
        args, constants = _spread(call, args[0])
    value = method(args) if call.kind == "reduce" else method(*args, **constants)
    return _awaited(worker, call, value) if inspect.iscoroutine(value) else value


def _spread(call: NodeCall, arguments: object) -> tuple[list[object], dict[str, Any]]:
    if not isinstance(arguments, Arguments):
        raise RunError(
            f"{call.label} spreads its input over a call, but was given a {type(arguments).__name__}; replay the phase with "
            "Arguments(args, kwargs)"
        )
    return list(arguments.args), dict(arguments.kwargs)


def _awaited(worker: object, call: NodeCall, coroutine: Coroutine[Any, Any, object]) -> object:
    """Runs a coroutine on the actor's event loop, where its `async` methods run, until it ends or is aborted."""
    state = state_of(worker)
    if state.event_loop is None:
        coroutine.close()
        raise RunError(
            f"{call.label} returned a coroutine, but its actor has no event loop: Ray gives one to actors whose class has "
            "an `async def` method. Await it inside the method, or make the method an `async def`"
        )
    state.coroutine = asyncio.run_coroutine_threadsafe(coroutine, state.event_loop)
    try:
        return state.coroutine.result()
    except CancelledError:
        raise RunError(f"{call.label} was aborted while it ran on the actor's event loop") from None
    finally:
        state.coroutine = None


def _failure(state: NodeState, call: NodeCall, packet: Packet, error: BaseException) -> WorkerFailure:
    member = state.members[call.role]
    return WorkerFailure(
        role=member.role,
        rank=member.rank,
        coordinates=member.coordinates,
        host=socket.gethostname(),
        pid=os.getpid(),
        phase=packet.header.phase,
        replay=packet.header.replay,
        node=call.label,
        kind="raised",
        message=error_text(error)[:FAILURE_CHARACTERS],
        traceback=printable("".join(traceback.format_exception(error)))[-FAILURE_CHARACTERS:],
        time_ns=time.time_ns(),
    )


def failed_packet(worker: object, call: NodeCall, packet: Packet, error: Exception) -> Packet:
    """Returns a packet that reports `error`, in place of one that cannot be written."""
    failure = _failure(state_of(worker), call, packet, error)
    return packet._replace(value=None, failures=(*packet.failures, failure))


def _abort(worker: object) -> None:
    """Frees peers that wait for this worker in a collective. If that fails too, the driver still gets the first failure."""
    abort = getattr(worker, "abort", None)
    if abort is None:
        return
    try:
        abort()
    except Exception:
        logger.warning("the worker's abort() raised; its peers wait until their deadline", exc_info=True)


# Plain calls of the driver, which run on other threads of the actor than the graph loops.


def drain_runs(worker: object, role: str) -> list[NodeRun]:
    """Returns the worker's node runs in a role since the last call, oldest first."""
    runs = state_of(worker).members[role].runs
    return [NodeRun(*runs.popleft()) for _ in range(len(runs))]


def abort(worker: object) -> None:
    """Ends what the worker waits for: its collectives by its `abort()`, and a coroutine by cancelling it."""
    _abort(worker)
    coroutine = state_of(worker).coroutine
    if coroutine is not None:
        coroutine.cancel()


def reset_tickets(worker: object, ticket: int) -> None:
    state_of(worker).gate.reset(ticket)


@dataclass(frozen=True)
class WorkerLocation:
    """The host and process of a worker."""

    host: str
    pid: int
    node: str  # Ray's node id


def where(worker: object) -> WorkerLocation:
    return WorkerLocation(socket.gethostname(), os.getpid(), str(ray.get_runtime_context().get_node_id()))


class Report(NamedTuple):
    """The node of a replay that a worker runs, for how long, and the stack of its thread. `what` is empty if it is idle.

    `starved_s`: for how long its threads have waited for a processor since it started, all together.
    """

    phase: str
    replay: int
    what: str
    stack: str
    role: str = ""
    starved_s: float = 0.0
    running_s: float = 0.0


IDLE = Report("", 0, "", "")
NO_ANSWER = Report("", 0, "does not answer", "")
DIED = Report("", 0, "died", "")


def report(worker: object) -> Report:
    activity = state_of(worker).activity
    if activity is None:
        return IDLE
    role, phase, replay, label, thread, since = activity
    frame = sys._current_frames().get(thread)
    stack = "".join(traceback.format_stack(frame)) if frame else ""
    return Report(phase, replay, label, stack[-FAILURE_CHARACTERS:], role, starved_s(), time.monotonic() - since)
