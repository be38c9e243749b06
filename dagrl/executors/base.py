"""What an executor is: it makes an `Executable` of a `PhaseGraph` and the actors it runs on.

Two executors run the same graphs with the same results: `compiled` (Ray Compiled Graphs, replayed over shared-memory and
accelerator channels) and `eager` (plain actor calls; the baseline and the fallback).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ray.actor import ActorHandle

from dagrl.errors import WorkerFailure
from dagrl.executors.hosts import RELAY, relays_input
from dagrl.executors.node import NodeCall, Take
from dagrl.executors.packet import ENVELOPE_BYTES, Packet
from dagrl.executors.shards import ShardsGraph
from dagrl.graph import SHARED_MEMORY, Constant, InputRef, Json, Node, NodeRef, PhaseGraph, WorkerRef

Actors = Mapping[str, Sequence[ActorHandle]]
"""Actors of each role, in the order of the graph's worker positions."""


@dataclass(frozen=True)
class Limits:
    """Sizes and deadlines of one compiled phase. Bytes are of one input, or one result; times are in seconds.

    `may_kill`: its workers are ours, to be killed where a teardown waits for them in vain. `result_key`: what sets
    `result_bytes`, for the error of a result that is larger.
    """

    input_bytes: int
    result_bytes: int
    max_in_flight: int
    compile_s: float
    replay_s: float
    teardown_s: float
    may_kill: bool = True
    result_key: str = "executor_cfg.result_bytes"


class Executable(Protocol):
    """One graph, ready to be replayed on its actors."""

    def submit(self, packet: Packet) -> Any:
        """Start a replay; returns what `fetch` takes."""

    def fetch(self, submitted: Any, timeout_s: float) -> list[Packet]:
        """A packet for each output of the graph.

        Raises TimeoutError when late, ActorDiedError when a worker died, UnreadableError for a result that this process
        cannot unpickle; the graph is whole after that.
        """

    def failures(self, submitted: Any) -> Sequence[WorkerFailure]:
        """Those of workers whose outputs have come, while `fetch` was late."""

    def teardown(self, timeout_s: float) -> None:
        """Stop the graph's loops, and return within `timeout_s`; workers that do not stop in time are killed."""


class Executor(Protocol):
    """Makes executables."""

    name: str

    def compile(self, graph: PhaseGraph, actors: Actors, limits: Limits) -> Executable:
        """The graph on these actors, ready to replay."""


def node_calls(graph: PhaseGraph, limits: Limits) -> list[NodeCall]:
    """The constant part of every node, in the graph's order."""
    places, last = _places(graph)
    beside = accelerated(graph)
    rooms = result_rooms(graph, limits)
    return [
        NodeCall(
            label=label_of(graph, node),
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
        )
        for node in graph.nodes
    ]


def label_of(graph: PhaseGraph, node: Node) -> str:
    """The node's label as its phase was traced."""
    return graph.label(node) if isinstance(graph, ShardsGraph) else node.label


def result_rooms(graph: PhaseGraph, limits: Limits) -> list[int]:
    """Bytes that the value of each node may have: those of a result, or of all that are in a list of them.

    So it does not matter where a list is put together: in the driver, in a tree, or on each host.
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
    """The place of each node among those of its worker, and the nodes that are the last of theirs.

    Without relays, which hand on whoever's turn it is: other workers wait for them.
    """
    of_worker: dict[WorkerRef, list[int]] = {}
    for node in graph.nodes:
        if node.kind != RELAY:
            of_worker.setdefault(node.worker, []).append(node.number)
    places = {number: place for numbers in of_worker.values() for place, number in enumerate(numbers)}
    return places, {numbers[-1] for numbers in of_worker.values()}


def accelerated(graph: PhaseGraph) -> set[int]:
    """Nodes whose result goes to another worker over an accelerator.

    What only its own worker reads is passed by reference, and the driver is on no accelerator.
    """
    return {
        number
        for node in graph.nodes
        for number in node.upstream
        if graph.nodes[number].transport != SHARED_MEMORY and graph.nodes[number].worker != node.worker
    } - set(graph.outputs)


def packet_sources(node: Node) -> tuple[int | None, ...]:
    """Where each packet of a node comes from, in order: a node's number, or None for the phase's input."""
    return tuple(arg.node if isinstance(arg, NodeRef) else None for arg in node.args if not isinstance(arg, Constant))


def _takes(graph: PhaseGraph, node: Node) -> tuple[Take | Json, ...]:
    takes: list[Take | Json] = []
    share = (graph.shard(node.worker), graph.shards) if isinstance(graph, ShardsGraph) and graph.splits else None
    index = 0
    for arg in node.args:
        match arg:
            case Constant(value):
                takes.append(value)
            case NodeRef(number):
                flatten = node.kind == "collect" and graph.nodes[number].kind == "collect"
                takes.append(Take(index, flatten, share if relays_input(graph, graph.nodes[number]) else None))
                index += 1
            case InputRef():
                takes.append(Take(index, share=share))
                index += 1
    return tuple(takes)
