"""Ray Compiled Graphs: binds, compiles and tears down with deadlines. The only module that imports `ray.dag`.

Both engines compile here. The `ray` engine uses Ray's own loop, channels, `execute` and `get`. The `dagrl` engine replaces
private parts of Ray within `replaced_parts`; `unknown_parts` lists those that this Ray lacks or has in another form.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.dag import DAGContext, InputNode, MultiOutputNode
from ray.exceptions import GetTimeoutError

from dagrl.runtime.deadline import in_background
from dagrl.runtime.executors.base import Actors, GraphLimits, accelerated
from dagrl.runtime.executors.loop import raise_lost_link, run_tasks, start_loop
from dagrl.runtime.graph import PhaseGraph

logger = logging.getLogger(__name__)

Dag = Any
"""A `ray.dag.compiled_dag_node.CompiledDAG`; Ray has no types."""

IDLE_S = 5.0
"""Ray's loop wakes at least this often while it waits for input."""

LOOPS = "_ray_system"
"""Ray's concurrency group for graph loops; it has one thread unless the actor was made with more. Each live graph of Ray's
engine holds one; dagrl's loops have threads of their own (`loop.py`), and need it only to start and to end."""

PATIENCE = 0.8
"""Share of a teardown's time after which actors with running loops are killed; the rest is for their end."""

CHANNELS = "ray.experimental.channel"

CHATTY = "ray.dag"
"""Ray's logger that prints each step of a teardown, and the traceback of each dead worker, which our own error reports."""


@functools.cache
def unknown_parts() -> tuple[str, ...]:
    """Returns the private parts of Ray that `replaced_parts` and the edges rely on and this Ray does not have."""
    return tuple(name for name, known in _known_parts().items() if not _holds(known))


def _known_parts() -> dict[str, Callable[[], bool]]:
    nodes = functools.partial(importlib.import_module, "ray.dag.compiled_dag_node")
    channels = functools.partial(importlib.import_module, CHANNELS)
    methods = {"ensure_registered_as_writer", "ensure_registered_as_reader", "write", "read", "close"}
    return {
        "do_exec_tasks(self, tasks, schedule, overlap_gpu_communication)": lambda: (
            _parameters(nodes().do_exec_tasks) == ["self", "tasks", "schedule", "overlap_gpu_communication"]
        ),
        "CompiledDAG starts do_exec_tasks": lambda: _names(nodes().CompiledDAG._get_or_compile, "do_exec_tasks"),
        "CompiledDAG.DAGDriverProxyActor": lambda: hasattr(nodes().CompiledDAG.DAGDriverProxyActor, "options"),
        "CompiledDAG.dag_input_channels, dag_output_channels, worker_task_refs": lambda: _names(
            nodes().CompiledDAG.__init__, "dag_input_channels", "dag_output_channels", "worker_task_refs"
        ),
        "ActorHandle._get_local_state": lambda: callable(ActorHandle._get_local_state),
        "ExecutableTask.task_inputs, input_channels, output_channels": lambda: _names(
            nodes().ExecutableTask.__init__, "task_inputs", "input_channels", "output_channels"
        ),
        "ExecutableTask.prepare(self, overlap_gpu_communication), cancel(self)": lambda: (
            _parameters(nodes().ExecutableTask.prepare) == ["self", "overlap_gpu_communication"]
            and _parameters(nodes().ExecutableTask.cancel) == ["self"]
        ),
        "_ExecutableTaskInput.input_variant, resolve": lambda: (
            _names(nodes()._ExecutableTaskInput.__init__, "input_variant") and callable(nodes()._ExecutableTaskInput.resolve)
        ),
        "DAGNode.type_hint": lambda: importlib.import_module("ray.dag").DAGNode.type_hint.fset is not None,
        "ChannelOutputType.create_channel(self, writer, reader_and_node_list, driver_actor_id)": lambda: (
            _parameters(channels().ChannelOutputType.create_channel)
            == ["self", "writer", "reader_and_node_list", "driver_actor_id"]
        ),
        "ChannelInterface": lambda: methods <= set(dir(importlib.import_module(f"{CHANNELS}.common").ChannelInterface)),
        "IntraProcessChannel(num_readers)": lambda: "num_readers" in _parameters(channels().IntraProcessChannel),
    }


def _parameters(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _names(function: Any, *names: str) -> bool:
    """Whether the code of a function names these globals or attributes."""
    return set(names) <= set(function.__code__.co_names)


def _holds(known: Callable[[], bool]) -> bool:
    try:
        return known()
    except (ImportError, AttributeError, TypeError, ValueError):  # what a part that is gone raises
        return False


def bind_graph(
    graph: PhaseGraph,
    actors: Actors,
    function: Callable[..., object],
    calls: Sequence[object],
    hints: Sequence[object] | None = None,
    input_hint: object = None,
) -> Any:
    """Returns the Ray DAG: one `__ray_call__` of `function(worker, call, *packets)` per node.

    `hints`: the channel type of each node's result; None leaves the choice to Ray.
    """
    on_accelerators = accelerated(graph)
    with InputNode() as start:
        if hints is not None:
            start.type_hint = input_hint
        bound: list[Any] = []
        for node, call in zip(graph.nodes, calls, strict=True):
            packets = [start if source is None else bound[source] for source in node.sources]
            bound.append(actor_of(graph, actors, node.number).__ray_call__.bind(function, call, *packets))
            if hints is not None:
                bound[-1].type_hint = hints[node.number]
            if node.number in on_accelerators:
                bound[-1].with_tensor_transport(node.transport)
        return MultiOutputNode([bound[number] for number in graph.outputs])


def actor_of(graph: PhaseGraph, actors: Actors, number: int) -> ActorHandle:
    worker = graph.nodes[number].worker
    return actors[worker.role][worker.position]


def writers_of(graph: PhaseGraph, actors: Actors) -> list[tuple[str, str]]:
    """Returns the id of the actor and the label of the node of each output."""
    return [(actor_of(graph, actors, number)._actor_id.hex(), graph.label(graph.nodes[number])) for number in graph.outputs]


def distinct(actors: Actors) -> list[ActorHandle]:
    return list({actor._actor_id: actor for group in actors.values() for actor in group}.values())


def prepare_workers(sizes: Mapping[ActorHandle, int | None], limits: GraphLimits, accelerator: bool) -> list[str]:
    """Returns the Ray nodes of workers. `sizes`: those of Ray's channels that each writes in graphs compiled next, if any.

    Raises TimeoutError for an actor without a free thread for loops.
    """
    called = [call_loop(actor, _prepare_worker, size, accelerator) for actor, size in sizes.items()]
    try:
        nodes: list[str] = ray.get(called, timeout=limits.compile_s)
        return nodes
    except GetTimeoutError as late:
        raise TimeoutError(
            f"a worker had no free thread of Ray's for loops within {limits.compile_s:.0f} s. A compiled graph of Ray's own "
            f'engine holds one; make the actor with concurrency_groups={{"{LOOPS}": n}} for n of them (WorkerGroup.create '
            "does), or tear down the graph that somebody else compiled on it"
        ) from late


def call_loop(actor: ActorHandle, function: Callable[..., Any], *args: object) -> ray.ObjectRef:
    """Calls `function(worker, *args)` on one of the actor's threads for loops."""
    return actor.__ray_call__.options(concurrency_group=LOOPS).remote(function, *args)


def _prepare_worker(worker: object, channel_bytes: int | None, accelerator: bool) -> str:
    """Runs in the worker. Ray's loop wakes every 0.1 s by default to notice errors of other inputs; ours are values."""
    if channel_bytes is not None:
        context = DAGContext.get_current()
        context.read_iteration_timeout = IDLE_S
        context.buffer_size_bytes = channel_bytes
        if accelerator:
            importlib.import_module(CHANNELS).ChannelContext.get_current()._torch_available = True
    return str(ray.get_runtime_context().get_node_id())


def compile_dag(bound: Any, phase: str, limits: GraphLimits, accelerator: bool) -> Dag:
    """Compiles a bound graph within `limits.compile_s`, on a thread: Ray waits for workers and communicators forever."""
    if not logger.isEnabledFor(logging.DEBUG):
        logging.getLogger(CHATTY).setLevel(logging.CRITICAL)
    most = limits.max_in_flight
    options: dict[str, Any] = {"_max_inflight_executions": most, "_max_buffered_results": most}
    if limits.overlap_communication and accelerator:
        options["_overlap_gpu_communication"] = True
    compiled: Future[Dag] = in_background(functools.partial(bound.experimental_compile, **options), f"dagrl-compile-{phase}")
    try:
        return compiled.result(limits.compile_s)
    except BaseException as error:
        if compiled.done():
            raise
        compiled.add_done_callback(_tear_down_unused)
        if not isinstance(error, TimeoutError):
            raise
        raise TimeoutError(
            f"Ray had not compiled it within timeouts.compile_s = {limits.compile_s:g} s: a worker does not "
            "answer, or a communicator between GPUs was not made"
        ) from error


def _tear_down_unused(compiled: Future[Dag]) -> None:
    """Tears down a graph that was compiled after its deadline."""
    if compiled.exception() is None:
        compiled.result().teardown()


def teardown_dag(
    stop: Callable[[], None],
    phase: str,
    limits: GraphLimits,
    running: Callable[[float], list[ActorHandle]],
    timeout_s: float,
) -> None:
    """Ends the loops by `stop()` within `timeout_s`; kills actors of ours whose loops keep running for most of that time.

    `running(seconds)` returns these actors. Ray also waits for an actor's plain calls; those get no actor killed, as the
    loops end without them.
    """
    deadline = time.monotonic() + timeout_s
    stopper = threading.Thread(target=stop, name=f"dagrl-teardown-{phase}", daemon=True)
    stopper.start()
    stopper.join(PATIENCE * timeout_s)
    if stopper.is_alive() and (stuck := running(max(0.0, deadline - time.monotonic()) / 2)):
        logger.warning(
            "the graph of phase %r did not stop within %.1f s on %d workers; %s",
            phase,
            PATIENCE * timeout_s,
            len(stuck),
            "killing them" if limits.may_kill else "they were not created by this group and keep running",
        )
        if limits.may_kill:
            for actor in stuck:
                ray.kill(actor)
            stopper.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def driver_settings(limits: GraphLimits) -> Iterator[None]:
    """Sets Ray's input size and deadlines for graphs compiled inside; Ray's own deadlines are 10 s."""
    context = DAGContext.get_current()
    before = (context.buffer_size_bytes, context.submit_timeout, context.get_timeout, context.teardown_timeout)
    context.buffer_size_bytes = limits.input_bytes
    context.submit_timeout = context.get_timeout = max(1, round(limits.replay_s))
    context.teardown_timeout = max(1, round(limits.teardown_s))
    try:
        yield
    finally:
        context.buffer_size_bytes, context.submit_timeout, context.get_timeout, context.teardown_timeout = before


@contextmanager
def replaced_parts(name: str, accelerator: bool) -> Iterator[None]:
    """Replaces Ray's loop and the driver's proxy for a graph, called `name`, compiled inside.

    Ray starts an actor for each graph, a whole process, through which its channels to the driver are made
    (ray/dag/compiled_dag_node.py, `CompiledDAG.__init__`); ours need only an id. Graphs with edges between accelerators keep
    that actor, and Ray's loop, on a thread of ours.
    """
    nodes: Any = importlib.import_module("ray.dag.compiled_dag_node")
    loop, proxy_class = nodes.do_exec_tasks, nodes.CompiledDAG.DAGDriverProxyActor
    nodes.do_exec_tasks = functools.partial(start_loop, run_rays_tasks if accelerator else run_tasks, name)
    if not accelerator:
        nodes.CompiledDAG.DAGDriverProxyActor = DriverId
    try:
        yield
    finally:
        nodes.do_exec_tasks, nodes.CompiledDAG.DAGDriverProxyActor = loop, proxy_class


@dataclass(frozen=True)
class DriverId:
    """Stands for the driver among the readers of an edge, with the parts of an actor's class and handle that Ray uses."""

    _actor_id: bytes

    @staticmethod
    def options(**options: object) -> type[DriverId]:
        """Returns the class: there is no process to place."""
        return DriverId

    @staticmethod
    def remote() -> DriverId:
        return DriverId(uuid.uuid4().bytes)


def run_rays_tasks(worker: object, tasks: Sequence[Any], *rays: object) -> None:
    """Runs Ray's own loop, which ends silently. Raises RayChannelError if a link was lost. Runs in the worker."""
    importlib.import_module("ray.dag.compiled_dag_node").do_exec_tasks(worker, tasks, *rays)
    raise_lost_link(worker, tasks)
