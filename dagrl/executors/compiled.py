"""The compiled executor: one Ray Compiled Graph a `PhaseGraph`. The only module that imports `ray.dag`.

What the engine imposes, and how it is kept here (docs/runtime.md tells the whole story):

- Channel buffers are sized before compiling, in the driver for inputs and in every worker for results, and never grow: an
  input that would not fit is refused by the scheduler, a result by the worker.
- One live graph an actor is the default; actors made by `WorkerGroup` have a thread for each of several graphs.
- Each graph would start an actor, a whole process, only to stand for the driver as a reader; all of ours share one.
- Ray's shared-memory channels poll, grow and leave semaphores behind; `edge.py` has ours, of a fixed size.
- Ray's loop takes 10 us a node beside reading, running and writing; `loop.py` has ours.
- `teardown` of a hung graph waits for ever; ours has a deadline, then kills the actors whose loops have not ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.dag import DAGContext, InputNode, MultiOutputNode, compiled_dag_node
from ray.dag.compiled_dag_node import CompiledDAG
from ray.exceptions import GetTimeoutError, RayChannelError, RayChannelTimeoutError, RayTaskError
from ray.experimental.channel import ChannelContext

from dagrl.errors import RunError, WorkerFailure
from dagrl.executors.base import Actors, Limits, accelerated, label_of, node_calls, packet_sources, result_rooms
from dagrl.executors.edge import EdgeType, Place, make_mailbox
from dagrl.executors.gather import Gathering
from dagrl.executors.hosts import Hosts, with_relays
from dagrl.executors.loop import run_rays_tasks, run_tasks
from dagrl.executors.node import run_node
from dagrl.executors.outputs import Outputs, Submitted
from dagrl.executors.packet import Packet
from dagrl.executors.ring import KEPT
from dagrl.graph import PhaseGraph, WorkerRef

logger = logging.getLogger(__name__)

IDLE_S = 5.0
"""How long Ray's loop sleeps at most before it looks up."""

LOOPS = "_ray_system"
"""Ray's name for the threads of an actor that run graphs; one, unless the actor was made with more."""

PATIENCE = 0.8
"""Share of a teardown's time after which actors whose loops go on are killed; the rest is for their end."""

DEATH_S = 10.0
"""How long to wait for Ray to say which worker died, after edges were closed."""


class CompiledGraph:
    """A live Ray Compiled Graph."""

    def __init__(self, graph: PhaseGraph, actors: Actors, limits: Limits) -> None:
        self._phase = graph.phase
        self._limits = limits
        self._actors = _distinct(actors)
        accelerator = bool(accelerated(graph))
        hosts = _hosts(actors, dict(zip(self._actors, self._prepare(limits.result_bytes, accelerator), strict=True)))
        self._gathering = Gathering.of(graph, limits.result_bytes, hosts)
        graph = with_relays(self._gathering.graph, hosts, accelerated(self._gathering.graph))
        near = _only_driver_reads(graph, hosts)
        mailbox = make_mailbox(len(near), limits.max_in_flight + KEPT) if near else None
        places = {number: Place(mailbox.address, place) for place, number in enumerate(near)} if mailbox else {}
        with _driver_context(limits), _one_driver_proxy(), _loops(accelerator):
            self._dag = self._compile(_bind(graph, actors, limits, places))
        (self._input,) = self._dag.dag_input_channels
        writers = [
            (_actor(graph, actors, number)._actor_id.hex(), label_of(graph, graph.nodes[number])) for number in graph.outputs
        ]
        self._outputs = Outputs(self._dag.dag_output_channels, mailbox, writers)
        self._submitted = 0

    def _prepare(self, result_bytes: int, accelerator: bool) -> list[str]:
        """The workers' Ray nodes, from the threads that will run this graph: each live graph holds one on every worker."""
        prepared = [
            actor.__ray_call__.options(concurrency_group=LOOPS).remote(_prepare_worker, result_bytes, accelerator)
            for actor in self._actors
        ]
        try:
            nodes: list[str] = ray.get(prepared, timeout=self._limits.compile_s)
        except GetTimeoutError as late:
            raise TimeoutError(
                f"a worker had no free thread for its loop within {self._limits.compile_s:.0f} s. An "
                f"actor runs as many graphs at once as it has threads for them; make it with concurrency_groups="
                f'{{"{LOOPS}": n}} for n phases (WorkerGroup.create does), and of a class without async methods'
            ) from late
        return nodes

    def _compile(self, bound: Any) -> CompiledDAG:
        """Ray's compilation, which waits for workers and their communicators without a deadline: on a thread of its own."""
        most = self._limits.max_in_flight
        compiled: Future[CompiledDAG] = Future()

        def compile_() -> None:
            try:
                compiled.set_result(bound.experimental_compile(_max_inflight_executions=most, _max_buffered_results=most))
            except BaseException as error:
                compiled.set_exception(error)

        threading.Thread(target=compile_, name=f"dagrl-compile-{self._phase}", daemon=True).start()
        try:
            return compiled.result(self._limits.compile_s)
        except BaseException as error:
            if compiled.done():
                raise
            compiled.add_done_callback(_end_unwanted)
            if not isinstance(error, TimeoutError):
                raise
            raise TimeoutError(
                f"Ray had not compiled it within timeouts.compile_s = {self._limits.compile_s:g} s: a worker does not "
                "answer, or a communicator between GPUs was not made"
            ) from error

    def submit(self, packet: Packet) -> Submitted:
        """Write the input; the scheduler has checked size and replays in flight.

        The driver's ends of the edges are used without Ray's `execute` and `get`, whose bookkeeping of references takes
        20 us a replay, and 10 us more for each output.
        """
        try:
            self._input.write(packet, self._limits.replay_s)
        except RayChannelTimeoutError as late:
            limit = f"{self._limits.replay_s:.0f} s"
            raise RunError(f"no room for the input of phase {self._phase!r} in {limit}: {late}") from late
        self._submitted += 1
        return Submitted(self._submitted, packet.header)

    def fetch(self, submitted: Submitted, timeout_s: float) -> list[Packet]:
        """The outputs' packets of a replay; those of earlier ones that nobody fetched are dropped."""
        try:
            parts = self._outputs.read(submitted, timeout_s)
        except RayChannelTimeoutError as late:
            raise TimeoutError(str(late)) from late
        except RayChannelError:
            self._raise_death()
            raise
        return self._gathering.put_together(submitted.header, parts)

    def failures(self, submitted: Submitted) -> list[WorkerFailure]:
        """Those in the outputs that have come of a replay that `fetch` was late with."""
        return self._outputs.failures(submitted)

    def _raise_death(self) -> None:
        """Edges are closed because a worker's loop ended; raise what ended it.

        A death, if there is one: links to the dead are lost before Ray knows of it. The others' loops end in a moment.
        """
        running, raised = list(self._dag.worker_task_refs.values()), list[RayTaskError]()
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
        """Cancel the loops within `timeout_s`; the actors of those that go on for most of that time are killed, if ours.

        Ray also waits for whatever else an actor is at, such as a plain call. That is nothing to be killed for: the loops
        end without it.
        """
        deadline = time.monotonic() + timeout_s
        stopper = threading.Thread(target=self._dag.teardown, name=f"dagrl-teardown-{self._phase}", daemon=True)
        stopper.start()
        stopper.join(PATIENCE * timeout_s)
        if stopper.is_alive() and (stuck := self._running()):
            logger.warning(
                "the graph of phase %r did not stop within %.1f s; %s %d of its %d workers",
                self._phase,
                PATIENCE * timeout_s,
                "killing" if self._limits.may_kill else "it goes on in what was made by somebody else,",
                len(stuck),
                len(self._actors),
            )
            if self._limits.may_kill:
                for actor in stuck:
                    ray.kill(actor)
                stopper.join(max(0.0, deadline - time.monotonic()))

    def _running(self) -> list[ActorHandle]:
        """The actors whose loops have not ended."""
        loops = {loop: actor for actor, loop in self._dag.worker_task_refs.items()}
        _, running = ray.wait(list(loops), num_returns=len(loops), timeout=0)
        return [loops[loop] for loop in running]


class CompiledExecutor:
    """Makes compiled graphs."""

    name = "compiled"

    def compile(self, graph: PhaseGraph, actors: Actors, limits: Limits) -> CompiledGraph:
        """Compile the graph; its actors' loops run from here to its teardown."""
        return CompiledGraph(graph, actors, limits)


def _end_unwanted(compiled: Future[CompiledDAG]) -> None:
    """Give back what was compiled after nobody waited for it any more."""
    if compiled.exception() is None:
        compiled.result().teardown()


def _bind(graph: PhaseGraph, actors: Actors, limits: Limits, places: Mapping[int, Place]) -> Any:
    """The Ray DAG: an `__ray_call__` of `run_node` a node."""
    inputs = EdgeType(limits.input_bytes, limits.max_in_flight)
    with InputNode() as start:
        start.type_hint = inputs
        bound: list[Any] = []
        rooms = result_rooms(graph, limits)
        for node, call in zip(graph.nodes, node_calls(graph, limits), strict=True):
            packets = [start if source is None else bound[source] for source in packet_sources(node)]
            bound.append(_actor(graph, actors, node.number).__ray_call__.bind(run_node, call, *packets))
            bound[-1].type_hint = EdgeType(rooms[node.number], limits.max_in_flight, places.get(node.number))
            if call.accelerated:
                bound[-1].with_tensor_transport(node.transport)
        return MultiOutputNode([bound[number] for number in graph.outputs])


def _actor(graph: PhaseGraph, actors: Actors, number: int) -> ActorHandle:
    worker = graph.nodes[number].worker
    return actors[worker.role][worker.position]


def _distinct(actors: Actors) -> list[ActorHandle]:
    return list({actor._actor_id: actor for group in actors.values() for actor in group}.values())


def _hosts(actors: Actors, nodes: Mapping[ActorHandle, str]) -> Hosts:
    """The Ray node of each worker, and this driver's."""
    of = {WorkerRef(role, at): nodes[actor] for role, group in actors.items() for at, actor in enumerate(group)}
    return Hosts(of, ray.get_runtime_context().get_node_id())


def _only_driver_reads(graph: PhaseGraph, hosts: Hosts) -> list[int]:
    """Outputs, on this driver's host, that no node reads."""
    read = {number for node in graph.nodes for number in node.upstream}
    mine = [number for number in dict.fromkeys(graph.outputs) if number not in read]
    return [number for number in mine if hosts.of[graph.nodes[number].worker] == hosts.driver]


def _prepare_worker(worker: object, result_bytes: int, accelerator: bool) -> str:
    """Settings of Ray's loop, which runs nodes with edges between accelerators; runs in the worker, and gives its Ray node.

    A loop that waits for its input looks up only every few seconds (Ray's default is 0.1 s, to notice the errors of other
    inputs early; ours travel as values). What is no tensor goes over a channel of Ray's of `result_bytes`.
    """
    if accelerator:
        DAGContext.get_current().read_iteration_timeout = IDLE_S
        DAGContext.get_current().buffer_size_bytes = result_bytes
        ChannelContext.get_current()._torch_available = True
    return str(ray.get_runtime_context().get_node_id())


@contextmanager
def _loops(accelerator: bool) -> Iterator[None]:
    """Let workers of graphs compiled inside run our loop; Ray's, if edges go from accelerator to accelerator."""
    rays = compiled_dag_node.do_exec_tasks
    compiled_dag_node.do_exec_tasks = run_rays_tasks if accelerator else run_tasks
    try:
        yield
    finally:
        compiled_dag_node.do_exec_tasks = rays


_proxies: dict[str, ActorHandle] = {}
"""The actor that stands for this driver, by host and Ray job; it lives as long as the job. The next cluster of one process
numbers its jobs from the start again, but its hosts have other names."""


@contextmanager
def _one_driver_proxy() -> Iterator[None]:
    """Let graphs compiled inside share one `DAGDriverProxyActor` (ray/dag/compiled_dag_node.py, `CompiledDAG.__init__`)."""
    proxy_class = CompiledDAG.DAGDriverProxyActor
    context = ray.get_runtime_context()
    job = f"{context.get_node_id()}/{context.get_job_id()}"
    if job not in _proxies:
        here = {ray._raylet.RAY_NODE_ID_KEY: context.get_node_id()}
        _proxies.clear()
        _proxies[job] = proxy_class.options(label_selector=here).remote()
    CompiledDAG.DAGDriverProxyActor = _SharedProxy(_proxies[job])
    try:
        yield
    finally:
        CompiledDAG.DAGDriverProxyActor = proxy_class


class _SharedProxy:
    """Stands where Ray expects an actor class, and always gives the same actor."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    def options(self, **options: object) -> _SharedProxy:
        return self

    def remote(self) -> ActorHandle:
        return self._actor


@contextmanager
def _driver_context(limits: Limits) -> Iterator[None]:
    """Ray's settings while compiling: this phase's input size and our deadlines instead of its 10 s."""
    context = DAGContext.get_current()
    before = (context.buffer_size_bytes, context.submit_timeout, context.get_timeout, context.teardown_timeout)
    context.buffer_size_bytes = limits.input_bytes
    context.submit_timeout = context.get_timeout = round(limits.replay_s)
    context.teardown_timeout = round(limits.teardown_s)
    try:
        yield
    finally:
        context.buffer_size_bytes, context.submit_timeout, context.get_timeout, context.teardown_timeout = before
