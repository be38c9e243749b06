"""Executors: make an `Executable` of a `PhaseGraph` and the actors it runs on.

Two executors run the same graphs with the same results: `compiled` (a static graph, run by dagrl's engine or by Ray's
Compiled Graphs) and `eager` (plain actor calls; the baseline and the fallback).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle

from dagrl.errors import WorkerFailure
from dagrl.runtime.edges.packet import ENVELOPE_BYTES, Packet
from dagrl.runtime.executors.node import NodeCall, Take
from dagrl.runtime.graph import SHARED_MEMORY, Constant, InputRef, Node, NodeRef, PhaseGraph, WorkerRef
from dagrl.runtime.passes import RELAY

logger = logging.getLogger(__name__)

Actors = Mapping[str, Sequence[ActorHandle]]  # actors of each role, in the order of the graph's worker positions
Nodes = Mapping[str, Sequence[str]]  # the Ray nodes of these actors
PATIENCE = 0.8  # share of a teardown's time after which actors with running loops are killed


@dataclass(frozen=True)
class GraphLimits:
    """Sizes and deadlines of one compiled phase. Bytes are those of one input or one result; times are in seconds.

    `may_kill`: dagrl created its workers, and a teardown kills those that do not stop. `input_key` and `result_key`: the
    settings of `input_bytes` and `result_bytes`, for the errors of larger values.
    """

    input_bytes: int
    result_bytes: int
    max_in_flight: int
    compile_s: float
    replay_s: float
    teardown_s: float
    may_kill: bool = True
    input_key: str = "input_bytes of Scheduler.add"
    result_key: str = "SchedulerOptions.result_bytes"


class Executable(Protocol):
    """One graph, ready to be replayed on its actors."""

    def submit(self, packet: Packet) -> Any:
        """Starts a replay; returns what `fetch` takes."""

    def fetch(self, submitted: Any, timeout_s: float) -> Packet:
        """Returns the packet of the phase's output.

        Raises TimeoutError if late, ActorDiedError if a worker died, UnreadableError for a value that a process cannot
        unpickle.
        """

    @property
    def reusable(self) -> bool:
        """Whether it can be replayed after a failure of another graph, given that all of its own replays have ended."""

    def failures(self, submitted: Any) -> Sequence[WorkerFailure]:
        """Returns the failures in the outputs that have arrived of a replay whose `fetch` timed out."""

    def teardown(self, timeout_s: float) -> None:
        """Stops the graph's loops within `timeout_s`; kills workers that do not stop in time."""


Executor = Callable[[PhaseGraph, Actors, Nodes, GraphLimits], Executable]  # makes an executable of a graph on these actors


def kill_running(actors: Sequence[ActorHandle], phase: str, limits: GraphLimits, seconds: float) -> None:
    """Kills actors whose loops have not ended in a teardown of so many seconds, if dagrl made them."""
    if actors:
        what = "killing them" if limits.may_kill else "they were not created by this group and keep running"
        logger.warning("the graph of phase %r did not stop in %.1f s on %d workers; %s", phase, seconds, len(actors), what)
    for actor in actors if limits.may_kill else ():
        ray.kill(actor)


def node_calls(graph: PhaseGraph, limits: GraphLimits) -> list[NodeCall]:
    """Returns the constant part of every node, in the graph's order."""
    places, last = _places(graph)
    beside = accelerated(graph)
    rooms = result_rooms(graph, limits)
    return [
        NodeCall(
            role=node.worker.role,
            label=node.label,
            position=node.worker.position,
            kind=node.kind,
            method=node.method,
            args=_takes(graph, node),
            constants=dict(node.constants),
            place=places.get(node.number, 0),
            closes_turn=node.number in last,
            result_limit=rooms[node.number],
            result_key=limits.result_key,
            accelerated=node.number in beside,
            copied=tuple(name for name, value in node.constants if isinstance(value, list | dict)),
            keywords=node.keywords,
            number=node.number,
        )
        for node in graph.nodes
    ]


def result_rooms(graph: PhaseGraph, limits: GraphLimits) -> list[int]:
    """Returns the room for each node's value in bytes: `result_bytes`, and for a list the sum over its items.

    So a list has the same limit wherever it is assembled: in the driver, in a tree, or on each host.
    """
    rooms: list[int] = []
    for node in graph.nodes:
        if node.kind == "collect":
            rooms.append(ENVELOPE_BYTES + sum(rooms[number] for number in node.upstream))
        elif node.kind == RELAY:
            rooms.append(rooms[node.upstream[0]] if node.upstream else limits.input_bytes)
        else:
            rooms.append(limits.result_bytes)
    return rooms


def _places(graph: PhaseGraph) -> tuple[dict[int, int], set[int]]:
    """Returns each node's place among its worker's nodes, and each worker's last node. Relays take no turn."""
    of_worker: dict[WorkerRef, list[int]] = {}
    for node in graph.nodes:
        if node.kind != RELAY:
            of_worker.setdefault(graph.actor(node.worker), []).append(node.number)
    places = {number: place for numbers in of_worker.values() for place, number in enumerate(numbers)}
    return places, {numbers[-1] for numbers in of_worker.values()}


def accelerated(graph: PhaseGraph) -> set[int]:
    """Returns the nodes whose result is sent to another worker over an accelerator.

    A result that only its own worker reads is passed by reference, and the driver has no accelerator.
    """
    return {
        number
        for node in graph.nodes
        for number in node.upstream
        if graph.nodes[number].transport != SHARED_MEMORY
        and graph.actor(graph.nodes[number].worker) != graph.actor(node.worker)
    } - set(graph.outputs)


def _takes(graph: PhaseGraph, node: Node) -> tuple[object, ...]:
    takes: list[object] = []
    index = 0
    for arg in node.args:
        match arg:
            case Constant(value):
                takes.append(value)
            case NodeRef(number):
                flatten = node.kind == "collect" and graph.nodes[number].kind == "collect"
                takes.append(Take(index, flatten))
                index += 1
            case InputRef():
                takes.append(Take(index))
                index += 1
    return tuple(takes)
