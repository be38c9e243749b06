"""The eager executor: plain actor calls; what is large is put into the object store once. The baseline, and the fallback."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from dagrl.errors import WorkerFailure
from dagrl.executors.base import Actors, Limits, node_calls, packet_sources
from dagrl.executors.gather import Gathering
from dagrl.executors.node import HasState, NodeCall, run_node
from dagrl.executors.packet import Packet, payload_bytes
from dagrl.executors.pickling import UnreadableError
from dagrl.graph import PhaseGraph

INLINE_BYTES = 16 << 10
"""Inputs up to this size go with the calls: a `ray.put`, and a get on every worker, take longer than sending them again."""


class Sender:
    """Sends nodes to actors, to each of them in the order in which they are to run; of all graphs of a scheduler.

    An actor with one thread takes calls as they were sent. One with several (`max_concurrency`), or with an event loop
    (`async` methods), takes each as soon as its arguments are there; one that came before its turn would keep the thread
    that those before it need. So a node is sent there once the one before it has ended, of whatever phase.
    """

    def __init__(self) -> None:
        self._ended: dict[ActorHandle, ray.ObjectRef] = {}  # there when the last node that was sent has ended

    def send(self, actor: ActorHandle, call: NodeCall, packets: Sequence[Packet | ray.ObjectRef]) -> ray.ObjectRef:
        """The packet that the node will give."""
        if call.in_order:
            return actor.__ray_call__.remote(run_node, call, *packets)
        run = actor.__ray_call__.options(num_returns=2)
        packet, self._ended[actor] = run.remote(_run_after, self._ended.get(actor), call, *packets)
        return packet


def takes_in_order(actor: ActorHandle) -> bool:
    """Whether an actor runs calls one after the other, as they were sent."""
    return not actor._ray_allow_out_of_order_execution


def _run_after(worker: HasState, ended: None, call: NodeCall, *packets: Packet) -> tuple[Packet, None]:
    """Run a node; the second result tells that it has ended, and is small. Runs in the worker."""
    return run_node(worker, call, *packets), None


class EagerGraph:
    """A graph replayed as one actor call a node."""

    def __init__(self, graph: PhaseGraph, actors: Actors, limits: Limits, sender: Sender) -> None:
        self._sender = sender
        self._gathering = Gathering.of(graph, limits.result_bytes)
        graph = self._gathering.graph
        self._steps: list[tuple[ActorHandle, NodeCall, tuple[int | None, ...]]] = [
            (actor, dataclasses.replace(call, in_order=takes_in_order(actor)), packet_sources(node))
            for node, call in zip(graph.nodes, node_calls(graph, limits), strict=True)
            for actor in [actors[node.worker.role][node.worker.position]]
        ]
        self._outputs = graph.outputs
        self._writers = [
            (actor._actor_id.hex(), call.label) for actor, call, _ in (self._steps[number] for number in graph.outputs)
        ]

    def submit(self, packet: Packet) -> list[ray.ObjectRef]:
        """Send every node's call; results go from actor to actor as object references."""
        start = ray.put(packet) if payload_bytes(packet.value) > INLINE_BYTES else packet
        refs: list[ray.ObjectRef] = []
        for actor, call, sources in self._steps:
            packets = [start if source is None else refs[source] for source in sources]
            refs.append(self._sender.send(actor, call, packets))
        return [refs[number] for number in self._outputs]

    def fetch(self, submitted: list[ray.ObjectRef], timeout_s: float) -> list[Packet]:
        """The outputs' packets. Raises UnreadableError for a value that this process cannot make."""
        try:
            packets: list[Packet] = ray.get(submitted, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as late:
            raise TimeoutError(str(late)) from late
        except ray.exceptions.RaySystemError as error:
            self._raise_unreadable(submitted)
            raise error
        return self._gathering.put_together(packets[0].header, [packet.part for packet in packets])

    def failures(self, submitted: list[ray.ObjectRef]) -> list[WorkerFailure]:
        """Those in the outputs that have come; what Ray raises for one is for `fetch` to raise."""
        found: list[WorkerFailure] = []
        refs = list(dict.fromkeys(submitted))  # a phase may return one value twice
        for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
            with suppress(RayError):
                found += ray.get(ref).failures
        return found

    def _raise_unreadable(self, submitted: Sequence[ray.ObjectRef]) -> None:
        """Name the writer of the output that Ray cannot unpickle, if it is one."""
        for ref, writer in zip(submitted, self._writers, strict=True):
            try:
                ray.get(ref, timeout=0)
            except ray.exceptions.GetTimeoutError:
                continue
            except ray.exceptions.RaySystemError as error:
                unreadable = UnreadableError(error, None)
                unreadable.writer = writer
                raise unreadable from error

    def teardown(self, timeout_s: float) -> None:
        """Nothing runs between replays."""


class EagerExecutor:
    """Makes eager graphs; those of one executor keep their order on every actor."""

    name = "eager"

    def __init__(self) -> None:
        self._sender = Sender()

    def compile(self, graph: PhaseGraph, actors: Actors, limits: Limits) -> EagerGraph:
        """The graph, ready at once."""
        return EagerGraph(graph, actors, limits, self._sender)
