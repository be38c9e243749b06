"""The compiled executor with dagrl's engine: a Ray Compiled Graph with our loop, channels, submission and results.

How each limit of Ray's engine is handled (docs/runtime.md has the whole list):

- Channels have a fixed size, set before compiling. The scheduler rejects larger inputs, the worker larger results.
- Actors run one live graph by default, on a thread of Ray's; our loops have threads of their own, any number on any actor.
- Ray's shared-memory channels poll, grow and leave semaphores behind; `edge.py` replaces them.
- Ray's loop takes 10 us per node on top of reading, running and writing; `loop.py` replaces it.
- Ray starts an actor for each graph, through which its channels reach the driver; ours need none (`ray_dag.py`).
- `teardown` of a hung graph blocks forever; ours has a deadline, then kills the actors with running loops.
"""

from __future__ import annotations

import functools
import threading
import time
import uuid
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayChannelError, RayChannelTimeoutError, RayError, RayTaskError

from dagrl.errors import RunError, WorkerFailure
from dagrl.runtime.edges.packet import Packet
from dagrl.runtime.edges.ring import KEPT
from dagrl.runtime.executors import deaths, ray_dag
from dagrl.runtime.executors.base import Actors, GraphLimits, accelerated, node_calls, result_rooms
from dagrl.runtime.executors.edge import Edge, EdgeType, MailboxSlot, make_mailbox
from dagrl.runtime.executors.loop import loop_runs, wait_for_loop
from dagrl.runtime.executors.node import run_node
from dagrl.runtime.executors.outputs import Outputs, Submitted
from dagrl.runtime.graph import PhaseGraph, WorkerRef
from dagrl.runtime.passes.gather import Gathering
from dagrl.runtime.passes.hosts import Hosts, with_relays

DEATH_S = 10.0
"""How long to wait for Ray to say which worker died, after edges were closed."""


@dataclass(eq=False)
class CompiledGraph:
    """A live Ray Compiled Graph, run by dagrl's engine. `compile_graph` makes it."""

    phase: str
    limits: GraphLimits
    dag: ray_dag.Dag
    name: str  # of its loops
    start: Edge  # of its input, which the driver writes
    outputs: Outputs
    gathering: Gathering

    def __post_init__(self) -> None:
        self._actors = tuple(self.dag.worker_task_refs)
        self._submitted = 0
        deaths.watch(self, self._actors)

    @property
    def reusable(self) -> bool:
        """Whether all of its loops are running."""
        asked = [ray_dag.call_loop(actor, loop_runs, self.name) for actor in self._actors]
        try:
            return all(ray.get(asked, timeout=self.limits.teardown_s))
        except RayError:  # a worker died, or does not answer
            return False

    def on_death(self) -> None:
        """Tears the graph down after a death, so that no process waits for the dead one."""
        threading.Thread(target=self.dag.teardown, name=f"dagrl-death-{self.phase}", daemon=True).start()

    def submit(self, packet: Packet) -> Submitted:
        """Writes the input; the scheduler has checked its size and the replays in flight.

        Bypasses Ray's `execute` and `get`: their bookkeeping of references takes 20 us per replay and 10 us per output.
        """
        try:
            self.start.write(packet, self.limits.replay_s)
        except RayChannelTimeoutError as late:
            limit = f"{self.limits.replay_s:.0f} s"
            raise RunError(f"no room for the input of phase {self.phase!r} in {limit}: {late}") from late
        self._submitted += 1
        return Submitted(self._submitted, packet.header)

    def fetch(self, submitted: Submitted, timeout_s: float) -> list[Packet]:
        """Returns the outputs' packets of a replay; drops those of earlier replays that were not fetched."""
        try:
            parts = self.outputs.read(submitted, timeout_s)
        except RayChannelTimeoutError as late:
            raise TimeoutError(str(late)) from late
        except RayChannelError:
            self._raise_death()
            raise
        return self.gathering.put_together(submitted.header, parts)

    def failures(self, submitted: Submitted) -> list[WorkerFailure]:
        return self.outputs.failures(submitted)

    def _raise_death(self) -> None:
        """Raises what ended the first of the workers' loops, after edges were closed.

        A death comes first if there is one: peers lose their links to a dead worker before Ray knows of its death.
        """
        self.on_death()
        running, raised = list(self._ends.values()), list[RayTaskError]()
        deadline = time.monotonic() + DEATH_S
        while running and (left := deadline - time.monotonic()) > 0:
            ended, running = ray.wait(running, timeout=left)
            try:
                ray.get(ended)
            except RayTaskError as error:  # by a loop; a death is an error of another kind
                raised.append(error)
        if raised:
            first = min(raised, key=lambda error: getattr(error.cause, "time_ns", 0))
            raise first.cause if isinstance(first.cause, RayChannelError) else first

    def teardown(self, timeout_s: float) -> None:
        deaths.unwatch(self)
        ray_dag.teardown_dag(self._stop, self.phase, self.limits, lambda seconds: self._running(0.0), timeout_s)

    @functools.cached_property
    def _ends(self) -> dict[ActorHandle, ray.ObjectRef]:
        """A reference for each actor, available once its loop has ended. Holds one of Ray's threads for loops until then."""
        return {actor: ray_dag.call_loop(actor, wait_for_loop, self.name) for actor in self._actors}

    def _stop(self) -> None:
        """Closes the edges and waits for the loops."""
        self.dag.teardown()
        if ray.is_initialized():  # after `ray.shutdown`, `ray.wait` would start another cluster
            self._running(None)

    def _running(self, timeout_s: float | None) -> list[ActorHandle]:
        """Returns the actors whose loops have not ended within `timeout_s`. None: waits for all."""
        loops = {loop: actor for actor, loop in self._ends.items()}
        _, running = ray.wait(list(loops), num_returns=len(loops), timeout=timeout_s)
        return [loops[loop] for loop in running]


def compile_graph(graph: PhaseGraph, actors: Actors, limits: GraphLimits) -> CompiledGraph:
    """Compiles the graph; its actors' loops run from here to its teardown."""
    accelerator = bool(accelerated(graph))
    hosts = _hosts(actors, limits, accelerator)
    gathering = Gathering.of(graph, limits.result_bytes, hosts)
    graph = with_relays(gathering.graph, hosts, accelerated(gathering.graph))
    near = _only_driver_reads(graph, hosts)
    mailbox = make_mailbox(len(near), limits.max_in_flight + KEPT) if near else None
    slots = {number: MailboxSlot(mailbox.address, slot) for slot, number in enumerate(near)} if mailbox else {}
    rooms = result_rooms(graph, limits)
    hints = [EdgeType(room, limits.max_in_flight, slots.get(number), limits.tls) for number, room in enumerate(rooms)]
    inputs = EdgeType(limits.input_bytes, limits.max_in_flight, tls=limits.tls)
    name = f"{graph.phase}-{uuid.uuid4().hex}"
    with ray_dag.driver_settings(limits), ray_dag.replaced_parts(name, accelerator):
        bound = ray_dag.bind_graph(graph, actors, run_node, node_calls(graph, limits), hints, inputs)
        dag = ray_dag.compile_dag(bound, graph.phase, limits, accelerator)
    (start,) = dag.dag_input_channels
    outputs = Outputs(dag.dag_output_channels, mailbox, ray_dag.writers_of(graph, actors))
    return CompiledGraph(graph.phase, limits, dag, name, start, outputs, gathering)


def _hosts(actors: Actors, limits: GraphLimits, accelerator: bool) -> Hosts:
    """Prepares the workers, and returns their Ray nodes and this driver's. Ray's channels connect only accelerators."""
    workers = ray_dag.distinct(actors)
    sizes = dict.fromkeys(workers, limits.result_bytes if accelerator else None)
    nodes = dict(zip(workers, ray_dag.prepare_workers(sizes, limits, accelerator), strict=True))
    of = {WorkerRef(role, at): nodes[actor] for role, group in actors.items() for at, actor in enumerate(group)}
    return Hosts(of, ray.get_runtime_context().get_node_id())


def _only_driver_reads(graph: PhaseGraph, hosts: Hosts) -> list[int]:
    """Returns the outputs on this driver's host that no node reads."""
    read = {number for node in graph.nodes for number in node.upstream}
    mine = [number for number in dict.fromkeys(graph.outputs) if number not in read]
    return [number for number in mine if hosts.of[graph.nodes[number].worker] == hosts.driver]
