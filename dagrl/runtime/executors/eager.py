"""The eager executor: plain actor calls, with large inputs put into the object store once. The baseline and the fallback."""

import dataclasses
from collections.abc import Sequence
from contextlib import suppress

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from dagrl.errors import WorkerFailure
from dagrl.runtime.edges.packet import Packet, payload_bytes
from dagrl.runtime.executors.base import Actors, GraphLimits, Nodes, node_calls
from dagrl.runtime.executors.node import NodeCall, run_node
from dagrl.runtime.graph import PhaseGraph
from dagrl.runtime.passes import Gathering

INLINE_BYTES = 16 << 10  # inputs up to this size are sent with each call: a `ray.put` and a get on every worker take longer


class Sender:
    """Sends the nodes of all graphs of a scheduler, to each actor in the order in which they run.

    An actor with one thread runs calls in the order in which they were sent. One with several (`max_concurrency`), or with
    an event loop (`async` methods), starts each as soon as its arguments are there. A call that started before its turn
    would hold a thread that earlier calls need, so a node is sent there once the one before it has ended, in any phase.
    """

    def __init__(self) -> None:
        self._ended: dict[ActorHandle, ray.ObjectRef] = {}  # available once the last node sent has ended

    def send(self, actor: ActorHandle, call: NodeCall, packets: Sequence[Packet | ray.ObjectRef]) -> ray.ObjectRef:
        """Sends a node; returns a reference to its packet."""
        if call.in_order:
            return actor.__ray_call__.remote(run_node, call, *packets)
        run = actor.__ray_call__.options(num_returns=2)
        packet, self._ended[actor] = run.remote(_run_after, self._ended.get(actor), call, *packets)
        return packet


def takes_in_order(actor: ActorHandle) -> bool:
    """Returns whether an actor runs calls one at a time, in the order they were sent. False where Ray does not say."""
    return not getattr(actor, "_ray_allow_out_of_order_execution", True)


def _run_after(worker: object, ended: None, call: NodeCall, *packets: Packet) -> tuple[Packet, None]:
    """Runs a node. The second result is small and says that it has ended. Runs in the worker."""
    return run_node(worker, call, *packets), None


class EagerGraph:
    """A graph replayed as one actor call per node. Graphs with one `sender` keep their order on every actor."""

    def __init__(self, graph: PhaseGraph, actors: Actors, nodes: Nodes, limits: GraphLimits, sender: Sender) -> None:
        self._sender = sender
        self._gathering = Gathering.of(graph, limits.result_bytes)
        graph = self._gathering.graph
        self._steps: list[tuple[ActorHandle, NodeCall, tuple[int | None, ...]]] = [
            (actor, dataclasses.replace(call, in_order=takes_in_order(actor)), node.sources)
            for node, call in zip(graph.nodes, node_calls(graph, limits), strict=True)
            for actor in [actors[node.worker.role][node.worker.position]]
        ]
        self._outputs = graph.outputs

    def submit(self, packet: Packet) -> list[ray.ObjectRef]:
        """Sends every node's call; results pass from actor to actor as object references."""
        start = ray.put(packet) if payload_bytes(packet.value) > INLINE_BYTES else packet
        refs: list[ray.ObjectRef] = []
        for actor, call, sources in self._steps:
            packets = [start if source is None else refs[source] for source in sources]
            refs.append(self._sender.send(actor, call, packets))
        return [refs[number] for number in self._outputs]

    def fetch(self, submitted: list[ray.ObjectRef], timeout_s: float) -> Packet:
        try:
            packets: list[Packet] = ray.get(submitted, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as late:
            raise TimeoutError(str(late)) from late
        return self._gathering.put_together(packets[0].header, [packet.body for packet in packets])

    @property
    def reusable(self) -> bool:
        """Never: it costs nothing to make again, with a sender that waits for no call from before a failure."""
        return False

    def failures(self, submitted: list[ray.ObjectRef]) -> list[WorkerFailure]:
        """Returns the failures in the outputs that have arrived; `fetch` raises what Ray raises for one."""
        failures: list[WorkerFailure] = []
        for ref in ray.wait(submitted, num_returns=len(submitted), timeout=0)[0]:
            with suppress(RayError):
                failures += ray.get(ref).failures
        return failures

    def teardown(self, timeout_s: float) -> None:
        """Does nothing: nothing runs between replays."""
