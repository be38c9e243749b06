"""The compiled executor with dagrl's engine: loops on the actors, edges in shared memory and over TCP, results in a mailbox.

Of Ray it uses plain calls of actors alone: two per actor start a graph, one ends it. Edges have a fixed size, set before
compiling: the scheduler rejects larger inputs, the worker larger results. A teardown closes the edges, which ends every loop
that waits; workers whose loops go on are killed at its deadline.
"""

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from dagrl.errors import ConfigError, RunError, WorkerFailure
from dagrl.runtime.edges.mailbox import Mailbox
from dagrl.runtime.edges.memory import EdgeClosedError, EdgeTimeoutError
from dagrl.runtime.edges.packet import Header, Packet, PacketBody, body_from_wire
from dagrl.runtime.edges.ring import KEPT
from dagrl.runtime.executors.base import PATIENCE, Actors, GraphLimits, Nodes, kill_running
from dagrl.runtime.executors.dag import LOOPS, BoundNode, bind_graph, nodes_of
from dagrl.runtime.executors.edge import DRIVER, EdgeAddress, EdgeReader, EdgeSpec, EdgeWriter, Reader
from dagrl.runtime.executors.loop import LoopNode, end_loop, loop_runs, prepare_loop, start_loop
from dagrl.runtime.graph import PhaseGraph, Source, WorkerRef
from dagrl.runtime.passes import Hosts

DEATH_S = 10.0  # deadline for Ray to say which worker died, after edges were closed
ASK_S = 0.25  # interval at which a waiting driver asks the workers whether they live: a death closes no edge
ANSWER_S = 0.01  # longest wait for the answer before it looks at the results again
END_POLL_S = 0.005  # interval at which loops that were told to end are asked whether they have


class Submitted(NamedTuple):
    """A replay of one graph: its number among the graph's replays, from 1, and the header of its input."""

    number: int
    header: Header


@dataclass(frozen=True)
class LoopPlan:
    """The loops of a graph: the nodes of each worker with their edges, the edge of the input, and the outputs' cells."""

    loops: tuple[tuple[LoopNode, ...], ...]
    start: EdgeSpec
    cells: tuple[int | None, ...]


def plan_loops(
    nodes: Sequence[BoundNode],
    workers: Sequence[Reader],
    hosts: Mapping[Reader, str],
    outputs: Sequence[int],
    limits: GraphLimits,
) -> LoopPlan:
    """Plans the edges of a graph. `workers`: the worker of each node; `hosts`: those of the workers and the driver."""
    readers: dict[Source, dict[Reader, None]] = {None: {}, **{node.call.number: {} for node in nodes}}
    for node, worker in zip(nodes, workers, strict=True):
        for source in node.sources:
            readers[source][worker] = None
    for number in outputs:
        readers[number][DRIVER] = None
    worker_of = {node.call.number: worker for node, worker in zip(nodes, workers, strict=True)}
    near = [number for number in outputs if hosts[worker_of[number]] == hosts[DRIVER]]
    cells = {number: cell for cell, number in enumerate(number for number in near if list(readers[number]) == [DRIVER])}

    def edge(source: Source, writer: Reader, slot_bytes: int) -> EdgeSpec:
        others = [number for number in readers[source] if number != writer]
        near = tuple(number for number in others if hosts[number] == hosts[writer])
        far = tuple(number for number in others if hosts[number] != hosts[writer])
        cell = None if source is None else cells.get(source)
        return EdgeSpec(slot_bytes, limits.max_in_flight, near, far, cell)

    loops: dict[Reader, list[LoopNode]] = {worker: [] for worker in sorted(set(workers))}
    for node, worker in zip(nodes, workers, strict=True):
        loops[worker].append(LoopNode(node.call, node.sources, edge(node.call.number, worker, node.call.result_limit)))
    start = edge(None, DRIVER, limits.input_bytes)
    return LoopPlan(tuple(map(tuple, loops.values())), start, tuple(cells.get(number) for number in outputs))


def check_encryption(hosts: Hosts) -> None:
    """Raises ConfigError if Ray encrypts its connections, but edges to another host would not be encrypted."""
    if hosts.several and os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        raise ConfigError(
            "RAY_USE_TLS is set, but engine: dagrl would send batches, samples and metrics between hosts in plain text. Set "
            "executor_cfg.engine=ray (SchedulerOptions(engine='ray')), which sends them over Ray's encrypted connections"
        )


class DagrlGraph:
    """A live graph. Its actors' loops run from here to its teardown."""

    def __init__(self, graph: PhaseGraph, actors: Actors, nodes: Nodes, limits: GraphLimits) -> None:
        self._limits, self._phase = limits, graph.phase
        self._name = f"{graph.phase}-{uuid.uuid4().hex}"
        self._bound = bind_graph(graph, actors, nodes, limits)
        check_encryption(self._bound.hosts)
        self._submitted = 0
        self._alive: dict[ActorHandle, ray.ObjectRef] = {}
        self._ask_at = 0.0
        self._closing: list[Any] = []
        try:
            self._compile(actors)
        except BaseException as error:
            self._close()
            for actor in self._bound.actors:
                self._call(actor, end_loop)
            if isinstance(error, EdgeClosedError):
                raise RuntimeError(f"a worker ended before all loops had begun: {error}") from error
            raise

    def _compile(self, actors: Actors) -> None:
        until = time.monotonic() + self._limits.compile_s
        bound, nodes = self._bound, nodes_of(self._bound.dag)
        number_of = {actor._actor_id: number for number, actor in enumerate(bound.actors)}
        workers = [number_of[actors[node.call.role][node.call.position]._actor_id] for node in nodes]
        places = [bound.hosts.of[WorkerRef(node.call.role, node.call.position)] for node in nodes]
        hosts = {**dict(zip(workers, places, strict=True)), DRIVER: bound.hosts.driver}
        plan = plan_loops(nodes, workers, hosts, bound.outputs, self._limits)
        posted = sum(cell is not None for cell in plan.cells)
        mailbox = Mailbox.create(posted, self._limits.max_in_flight + KEPT) if posted else None
        self._start = EdgeWriter(plan.start)
        self._closing += [self._start, *([] if mailbox is None else [mailbox])]
        address = None if mailbox is None else mailbox.address
        addresses: dict[Source, EdgeAddress] = {None: self._start.address}
        for written in self._call_all(prepare_loop, [(mine, address) for mine in plan.loops], until):
            addresses |= written
        read = [{source for node in mine for source in node.sources if source in addresses} for mine in plan.loops]
        starts = [(me, {source: addresses[source] for source in mine}) for me, mine in enumerate(read)]
        self._call_all(start_loop, starts, until)
        edges = [EdgeReader(addresses[number], DRIVER) for number in bound.outputs]
        self._closing += edges
        self._outputs = Outputs(edges, plan.cells, mailbox)

    def _call_all(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], until: float) -> list[Any]:
        """Calls a function of `loop.py` on every actor, each with its own arguments."""
        calls = [self._call(actor, function, *mine) for actor, mine in zip(self._bound.actors, arguments, strict=True)]
        try:
            answers: list[Any] = ray.get(calls, timeout=max(0.0, until - time.monotonic()))
            return answers
        except GetTimeoutError as late:
            raise TimeoutError(
                f"its loops had not begun within compile_s = {self._limits.compile_s:g} s: a worker does not answer"
            ) from late

    def _call(self, actor: ActorHandle, function: Callable[..., Any], *args: object) -> ray.ObjectRef:
        """Calls a function of `loop.py`. Actors that dagrl made have threads that no plain call of others uses."""
        call = actor.__ray_call__.options(concurrency_group=LOOPS) if self._limits.may_kill else actor.__ray_call__
        return call.remote(function, self._name, *args)

    @property
    def reusable(self) -> bool:
        """Whether all of its loops are running."""
        asked = [self._call(actor, loop_runs) for actor in self._bound.actors]
        try:
            return all(ray.get(asked, timeout=self._limits.teardown_s))
        except RayError:  # a worker died, or does not answer
            return False

    def submit(self, packet: Packet) -> Submitted:
        """Writes the input; the scheduler has checked its size and the replays in flight."""
        self._start.write(packet, self._limits.replay_s)
        self._submitted += 1
        return Submitted(self._submitted, packet.header)

    def fetch(self, submitted: Submitted, timeout_s: float) -> Packet:
        """Returns the packet of a replay; drops those of earlier replays that were not fetched."""
        try:
            bodies = self._outputs.read(submitted, timeout_s)
        except EdgeTimeoutError as late:
            self._raise_death()
            raise TimeoutError(str(late)) from late
        except EdgeClosedError:
            self._raise_end()
            raise
        return self._bound.gathering.put_together(submitted.header, bodies)

    def failures(self, submitted: Submitted) -> list[WorkerFailure]:
        return self._outputs.failures(submitted)

    def _raise_death(self) -> None:
        """Asks the workers whether they live, now and then. Raises Ray's error of one that died, after closing the edges."""
        now = time.monotonic()
        if now < self._ask_at:
            return
        self._ask_at = now + ASK_S
        for actor in self._bound.actors:
            if actor not in self._alive:  # else it has not answered yet: it is busy, or about to be found dead
                self._alive[actor] = self._call(actor, loop_runs)
        refs = {ref: actor for actor, ref in self._alive.items()}
        for ref in ray.wait(list(refs), num_returns=len(refs), timeout=ANSWER_S)[0]:
            del self._alive[refs[ref]]
            try:
                ray.get(ref)
            except ActorUnavailableError:
                continue
            except RayActorError:
                self._close()
                self._end_loops(0.0)
                raise

    def _raise_end(self) -> None:
        """Raises what ended the first of the workers' loops, after edges were closed.

        A death comes first if there is one: peers lose their links to a dead worker before Ray knows of its death.
        """
        self._close()
        _, raised = self._end_loops(DEATH_S)
        for error in raised:
            if isinstance(error, RayActorError):
                raise error
        if raised:
            first = min(raised, key=lambda error: getattr(getattr(error, "cause", None), "time_ns", 0))
            cause = getattr(first, "cause", None)
            raise cause if isinstance(cause, RunError) else first

    def teardown(self, timeout_s: float) -> None:
        """Ends the loops; kills actors of ours whose loops keep running for most of `timeout_s`."""
        self._close()
        if not ray.is_initialized():  # `ray.wait` would start another cluster
            return
        running, _ = self._end_loops(PATIENCE * timeout_s)
        kill_running(running, self._phase, self._limits, PATIENCE * timeout_s)

    def _close(self) -> None:
        """Closes the edges of this process. A loop that waits on one ends, and closes its own."""
        for end in self._closing:
            with suppress(EdgeClosedError):
                end.close()

    def _end_loops(self, timeout_s: float) -> tuple[list[ActorHandle], list[RayError]]:
        """Ends all loops. Returns the actors whose loops have not ended in time, and what others ended with."""
        until = time.monotonic() + timeout_s
        asked = {self._call(actor, end_loop): actor for actor in self._bound.actors}
        raised: list[RayError] = []
        while asked:
            ready, _ = ray.wait(list(asked), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            for ref in ready:
                actor = asked.pop(ref)
                try:
                    ended = ray.get(ref)
                except RayError as error:  # the loop's, or that of a death
                    raised.append(error)
                    continue
                if not ended:
                    time.sleep(END_POLL_S)
                    asked[self._call(actor, end_loop)] = actor
            if time.monotonic() >= until:
                break
        return list(asked.values()), raised


class Outputs:
    """The outputs of one graph, read in the driver: those that workers post to its mailbox, and the edges of others.

    `cells`: the place of each in the mailbox.
    """

    def __init__(self, edges: Sequence[EdgeReader], cells: Sequence[int | None], mailbox: Mailbox | None) -> None:
        self._edges, self._cells = tuple(edges), tuple(cells)
        self._mailbox = mailbox
        self._posted = {cell: number for number, cell in enumerate(cells) if cell is not None}
        self._all_posted = list(self._posted) == list(range(len(edges)))
        self._number = 0
        self._arrived: dict[int | None, Any] = {}  # of replay `_number`, before a deadline; None: the mailbox
        self._taken: dict[tuple[int, int], PacketBody] = {}  # from rings, by replay and cell

    def read(self, replay: Submitted, timeout_s: float) -> list[PacketBody]:
        """Returns the body of each output of a replay.

        A read that timed out can be tried again. Raises EdgeTimeoutError, EdgeClosedError, UnreadableError.
        """
        deadline = time.perf_counter() + timeout_s
        if self._all_posted and self._mailbox is not None:
            return self._read_mailbox(self._mailbox, replay.number, deadline)
        if self._number != replay.number:
            self._number, self._arrived = replay.number, {}
        arrived = self._arrived
        if self._mailbox is not None and None not in arrived:
            arrived[None] = self._read_mailbox(self._mailbox, replay.number, deadline)
        for number, cell in enumerate(self._cells):
            if cell is None and number not in arrived:
                arrived[number] = self._read_edge(number, replay.header, deadline)
        self._arrived = {}
        return [arrived[number] if cell is None else arrived[None][cell] for number, cell in enumerate(self._cells)]

    def failures(self, replay: Submitted) -> list[WorkerFailure]:
        """Returns the failures in the outputs that came of a replay whose read timed out. Raises EdgeClosedError."""
        arrived = self._arrived if self._number == replay.number else {}
        bodies = [body for number, body in arrived.items() if number is not None] + arrived.get(None, [])
        if self._mailbox is not None and None not in arrived:  # announced results are still in the rings
            messages = self._mailbox.look(replay.number)
            bodies += [self._body(cell, message, replay.number, 0.0) for cell, message in messages.items()]
        return [failure for body in bodies for failure in body[2]]

    def _read_mailbox(self, mailbox: Mailbox, number: int, deadline: float) -> list[PacketBody]:
        messages: list[Any] = mailbox.collect(number, deadline - time.perf_counter())
        for cell, message in enumerate(messages):
            if type(message) is tuple and len(message) == 3:  # a body as it is
                continue
            messages[cell] = self._body(cell, message, number, max(0.0, deadline - time.perf_counter()))
        self._taken.clear()
        return messages

    def _body(self, cell: int, message: Any, number: int, timeout_s: float) -> PacketBody:
        """Returns the body that a message of the mailbox holds, or announces in the writer's ring."""
        if type(message) is tuple:
            return body_from_wire(message)
        key = (number, cell)
        if key not in self._taken:
            self._taken[key] = body_from_wire(self._edges[self._posted[cell]].read_message(message, timeout_s))
        return self._taken[key]

    def _read_edge(self, number: int, header: Header, deadline: float) -> PacketBody:
        while True:
            packet = self._edges[number].read(max(0.0, deadline - time.perf_counter()))
            if packet.header.replay >= header.replay:
                return packet.body
