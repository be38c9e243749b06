"""The compiled executor with Ray's engine: Ray's own loop, channels, `execute` and `get`, none of them replaced.

It runs on any Ray that has Compiled Graphs, with the results and errors of the other engine, and more slowly. Packets travel
through Ray's channels as bytes, pickled and unpickled here, so that

- a value that cannot be pickled or unpickled is its worker's failure and the graph lives on;
- arrays are copies: a view of a Ray channel would block the next write to it for as long as it is kept.

Failures of a graph arrive with all of its outputs: Ray drops outputs that it has read when another one is late.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayChannelTimeoutError, RayError

from dagrl.errors import RunError, WorkerFailure
from dagrl.runtime.edges.packet import ENVELOPE_BYTES, Header, Packet
from dagrl.runtime.edges.pickling import UnreadableError, dump, load
from dagrl.runtime.executors import ray_dag
from dagrl.runtime.executors.base import Actors, GraphLimits, accelerated, node_calls, result_rooms
from dagrl.runtime.executors.node import NodeCall, Report, failed_packet, report, run_node
from dagrl.runtime.graph import PhaseGraph
from dagrl.runtime.passes.gather import Gathering

LATE_S = 5.0
"""How long the reading thread waits for a result after the replay's deadline, which the scheduler enforces."""


@dataclass(frozen=True)
class PickledCall:
    """A node whose packets arrive as bytes. `pickles`: so does its result; not one that goes over an accelerator."""

    call: NodeCall
    pickles: bool


@dataclass(frozen=True)
class Executed:
    """A replay of one graph: the header of its input, and its outputs as Ray returned them."""

    header: Header
    outputs: Future[list[Any]]


class RayGraph:
    """A live Ray Compiled Graph, run by Ray's engine. Its actors' loops run from here to its teardown."""

    def __init__(self, graph: PhaseGraph, actors: Actors, limits: GraphLimits) -> None:
        self._phase = graph.phase
        self._limits = limits = replace(limits, input_bytes=limits.input_bytes + ENVELOPE_BYTES)
        self._actors = ray_dag.distinct(actors)
        self._gathering = Gathering.of(graph, limits.result_bytes)
        graph = self._gathering.graph
        self._places = [list(dict.fromkeys(graph.outputs)).index(number) for number in graph.outputs]
        graph = replace(graph, outputs=tuple(dict.fromkeys(graph.outputs)))  # Ray takes each output once
        self._writers = ray_dag.writers_of(graph, actors)
        ray_dag.prepare_workers(_channel_sizes(graph, actors, limits), limits, accelerator=False)
        on_accelerators = accelerated(graph)
        calls = [PickledCall(call, number not in on_accelerators) for number, call in enumerate(node_calls(graph, limits))]
        with ray_dag.driver_settings(limits):
            bound = ray_dag.bind_graph(graph, actors, run_pickled, calls)
            self._dag = ray_dag.compile_dag(bound, self._phase, limits, bool(on_accelerators))
        self._unread: queue.SimpleQueue[tuple[list[Any], Executed] | None] = queue.SimpleQueue()
        self._broken = False
        threading.Thread(target=self._read_outputs, name=f"dagrl-results-{self._phase}", daemon=True).start()

    @property
    def reusable(self) -> bool:
        """Whether no read of an output failed."""
        return not self._broken

    def submit(self, packet: Packet) -> Executed:
        """Executes the graph; the scheduler has checked the input's size and the replays in flight."""
        submitted = Executed(packet.header, Future())
        try:
            outputs = self._dag.execute(_pickled(packet))
        except RayChannelTimeoutError as late:
            limit = f"{self._limits.replay_s:.0f} s"
            raise RunError(f"no room for the input of phase {self._phase!r} in {limit}: {late}") from late
        self._unread.put((outputs, submitted))
        return submitted

    def _read_outputs(self) -> None:
        """Reads the outputs of each replay. Ray drops outputs that it has read when it times out before the last one, so
        this thread waits without interruption and `fetch` waits for this thread.
        """
        while (item := self._unread.get()) is not None:
            outputs, submitted = item
            try:
                submitted.outputs.set_result(ray.get(outputs, timeout=submitted.header.deadline_s + LATE_S))
            except BaseException as error:
                self._broken = True
                submitted.outputs.set_exception(error)
            del item, outputs  # Ray's references keep the graph alive

    def fetch(self, submitted: Executed, timeout_s: float) -> list[Packet]:
        try:
            outputs = submitted.outputs.result(timeout_s)
        except RayChannelTimeoutError as late:
            raise TimeoutError(str(late)) from late
        packets = [_unpickled(output, writer) for output, writer in zip(outputs, self._writers, strict=True)]
        return self._gathering.put_together(submitted.header, [packets[place].body for place in self._places])

    def failures(self, submitted: Executed) -> list[WorkerFailure]:
        """Returns nothing: failures arrive with all outputs."""
        return []

    def teardown(self, timeout_s: float) -> None:
        self._unread.put(None)
        ray_dag.teardown_dag(self._dag.teardown, self._phase, self._limits, self._running, timeout_s)

    def _running(self, timeout_s: float) -> list[ActorHandle]:
        """Returns the actors that report a running node of this phase; one that is busy with a plain call does not."""
        reports = {actor.__ray_call__.remote(report): actor for actor in self._actors}
        ready, _ = ray.wait(list(reports), num_returns=len(reports), timeout=timeout_s)
        return [reports[ref] for ref in ready if _runs(ref, self._phase)]


def run_pickled(worker: object, pickled: PickledCall, *items: Any) -> Any:
    """Runs one node on packets that are bytes. What this worker cannot pickle or unpickle is its failure."""
    call, packets = pickled.call, list[Packet]()
    for item in items:
        try:
            packets.append(Packet.from_wire(load(item)) if isinstance(item, bytes) else item)
        except UnreadableError as error:
            packets.append(failed_packet(worker, call, Packet.from_wire(error.content), error))
            call = replace(call, unread=True)
    packet = run_node(worker, call, *packets)
    if not pickled.pickles:
        return packet
    try:
        return _pickled(packet)
    except Exception as error:  # of the value's own classes
        return _pickled(failed_packet(worker, call, packet, error))


def _pickled(packet: Packet) -> bytes:
    return bytes(dump(packet.wire(), in_band=True)[0])


def _unpickled(item: Any, writer: tuple[str, str]) -> Packet:
    try:
        return Packet.from_wire(load(item)) if isinstance(item, bytes) else item
    except UnreadableError as error:
        error.writer = writer
        raise


def _channel_sizes(graph: PhaseGraph, actors: Actors, limits: GraphLimits) -> dict[ActorHandle, int]:
    """Returns the room of the largest result of each actor: Ray sizes all channels that a process writes alike."""
    sizes = dict.fromkeys(ray_dag.distinct(actors), ENVELOPE_BYTES)
    for number, room in enumerate(result_rooms(graph, limits)):
        actor = ray_dag.actor_of(graph, actors, number)
        sizes[actor] = max(sizes[actor], room + ENVELOPE_BYTES)
    return sizes


def _runs(ref: Any, phase: str) -> bool:
    try:
        found: Report = ray.get(ref)
    except RayError:  # it died
        return False
    return found.phase == phase
