"""One graph of a phase as a Ray DAG (`InputNode`, `bind`, `MultiOutputNode`), which both engines compile.

A node is one call of `run_pickled(worker, call, *packets)` on its actor through Ray's generic `__ray_call__`, so an actor
may be of any class. Ray's engine runs these calls as they are. dagrl's reads the nodes back (`nodes_of`) and runs them in
loops of its own.
"""

from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.dag import InputNode, MultiOutputNode

from dagrl.runtime.edges.packet import Packet
from dagrl.runtime.edges.pickling import UnreadableError, dump, load
from dagrl.runtime.executors.base import Actors, GraphLimits, Nodes, accelerated, node_calls
from dagrl.runtime.executors.node import NodeCall, abort, failed_packet, run_node
from dagrl.runtime.graph import PhaseGraph, Source, WorkerRef
from dagrl.runtime.passes import Gathering, Hosts, with_relays

LOOPS = "_ray_system"
"""Ray's concurrency group for graph loops. It has one thread unless the actor was made with more, and each live graph of
Ray's engine holds one. dagrl's loops have threads of their own."""


@dataclass(frozen=True)
class BoundGraph:
    """A Ray DAG, the actors of its nodes (each once), and how its outputs make up that of the phase.

    `outputs`: the numbers of its output nodes.
    """

    phase: str
    dag: Any  # Ray has no types
    actors: tuple[ActorHandle, ...]
    hosts: Hosts
    outputs: tuple[int, ...]
    gathering: Gathering


@dataclass(frozen=True)
class BoundNode:
    """A node of a bound graph: its call, and the numbers of the nodes that it reads (None: the input)."""

    call: NodeCall
    sources: tuple[Source, ...]


def bind_graph(graph: PhaseGraph, actors: Actors, nodes: Nodes, limits: GraphLimits) -> BoundGraph:
    """Binds a graph to its actors. `nodes`: the Ray node of each."""
    places = {WorkerRef(role, at): node for role, mine in nodes.items() for at, node in enumerate(mine)}
    hosts = Hosts(places, ray.get_runtime_context().get_node_id())
    gathering = Gathering.of(graph, limits.result_bytes, hosts)
    graph = with_relays(gathering.graph, hosts, accelerated(gathering.graph))
    calls = node_calls(graph, limits)
    bound: list[Any] = []
    with InputNode() as start:
        for node, call in zip(graph.nodes, calls, strict=True):
            packets = [start if source is None else bound[source] for source in node.sources]
            call_node = actors[call.role][call.position].__ray_call__.bind(run_pickled, call, *packets)
            bound.append(call_node.with_tensor_transport(node.transport) if call.accelerated else call_node)
        dag = MultiOutputNode([bound[number] for number in graph.outputs])
    return BoundGraph(
        graph.phase,
        dag,
        tuple({actor._actor_id: actor for actor in (actors[call.role][call.position] for call in calls)}.values()),
        hosts,
        graph.outputs,
        gathering,
    )


def nodes_of(dag: Any) -> list[BoundNode]:
    """Returns the nodes of a bound DAG in the order of their numbers."""
    nodes_by_number: dict[int, BoundNode] = {}
    waiting = list(dag.get_args())
    while waiting:
        _, call, *upstream = waiting.pop().get_args()
        if call.number not in nodes_by_number:
            sources = [None if isinstance(node, InputNode) else node.get_args()[1].number for node in upstream]
            nodes_by_number[call.number] = BoundNode(call, tuple(sources))
            waiting += [node for node in upstream if not isinstance(node, InputNode)]
    return [nodes_by_number[number] for number in sorted(nodes_by_number)]


def run_pickled(worker: object, call: NodeCall, *items: Any) -> Any:
    """Runs one node in Ray's engine. Packets are bytes, except those that go over an accelerator.

    So a value that cannot be pickled is this worker's failure and the graph lives on, and arrays are copies: a view of a Ray
    channel would block the next write to it for as long as it is kept. One that cannot be unpickled breaks the graph.
    """
    try:
        packets = [Packet.from_wire(load(item)) if isinstance(item, bytes) else item for item in items]
    except UnreadableError:
        abort(worker)  # it will not join its peers' collectives
        raise
    packet = run_node(worker, call, *packets)
    if call.accelerated:
        return packet
    try:
        return pickled(packet)
    except Exception as error:  # of the value's own classes
        return pickled(failed_packet(worker, call, packet, error))


def pickled(packet: Packet) -> bytes:
    return bytes(dump(packet.wire(), in_band=True)[0])
