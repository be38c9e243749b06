"""The compiled executor with Ray's engine: Compiled Graphs through their public parts, none of them replaced.

It alone has edges between accelerators. Results and errors are those of dagrl's engine; a replay takes more time. Values
travel as bytes (`dag.run_pickled`). Failures of a graph arrive with all of its outputs: Ray drops outputs that it has read
when another one is late.

Ray's limits, and what is done about them:

- Channels that grow leak memory and can block a teardown. They are sized before compiling, in every process that writes.
- Deadlines are 10 s. They are set to those of the phase.
- An actor runs one live graph on each thread of its group `_ray_system`. dagrl's own actors have enough of them.
- `teardown` of a hung graph blocks forever. It gets a deadline, after which the actors are killed.
"""

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.dag import DAGContext
from ray.exceptions import GetTimeoutError, RayChannelTimeoutError, RayError

from dagrl.attributes import setting
from dagrl.errors import WorkerFailure
from dagrl.runtime.deadline import in_background
from dagrl.runtime.edges.packet import ENVELOPE_BYTES, Header, Packet
from dagrl.runtime.edges.pickling import load
from dagrl.runtime.executors.base import PATIENCE, Actors, GraphLimits, Nodes, kill_running
from dagrl.runtime.executors.dag import LOOPS, BoundGraph, bind_graph, nodes_of, pickled
from dagrl.runtime.executors.node import report
from dagrl.runtime.graph import PhaseGraph

logger = logging.getLogger(__name__)

LATE_S = 5.0  # longest wait of the reading thread after the replay's deadline, which the scheduler enforces

IDLE_S = 5.0
"""Ray's loop wakes at least this often while it waits for input, to look for errors of others; ours travel as values."""

CHATTY = "ray.dag"
"""Ray's logger that prints each step of a teardown, and the traceback of each dead worker, which our own error reports."""


@dataclass(frozen=True)
class Executed:
    """A replay of one graph: the header of its input, and its outputs as Ray returned them."""

    header: Header
    outputs: Future[list[Any]]


class RayGraph:
    """A live Ray Compiled Graph, run by Ray's engine. Its actors' loops run from here to its teardown."""

    def __init__(self, graph: PhaseGraph, actors: Actors, nodes: Nodes, limits: GraphLimits) -> None:
        self._phase, self._limits = graph.phase, limits
        self._bound = bind_graph(graph, actors, nodes, limits)
        sizes = dict.fromkeys(self._bound.actors, ENVELOPE_BYTES)  # Ray sizes all channels that a process writes alike
        for node in nodes_of(self._bound.dag):
            actor = actors[node.call.role][node.call.position]
            sizes[actor] = max(sizes[actor], node.call.result_limit + ENVELOPE_BYTES)
        prepare_workers(sizes, limits)
        with driver_settings(limits):
            self._dag = compile_dag(self._bound, limits)
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
        outputs = self._dag.execute(pickled(packet))
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

    def fetch(self, submitted: Executed, timeout_s: float) -> Packet:
        try:
            outputs = submitted.outputs.result(timeout_s)
        except RayChannelTimeoutError as late:
            raise TimeoutError(str(late)) from late
        packets = [Packet.from_wire(load(one)) if isinstance(one, bytes) else one for one in outputs]
        return self._bound.gathering.put_together(submitted.header, [packet.body for packet in packets])

    def failures(self, submitted: Executed) -> list[WorkerFailure]:
        """Returns nothing: failures arrive with all outputs."""
        return []

    def teardown(self, timeout_s: float) -> None:
        """Tears the graph down within `timeout_s`; kills actors of ours that still run this phase for most of that time.

        Ray also waits for an actor's plain calls; those get no actor killed, as the loops end without them.
        """
        self._unread.put(None)
        deadline = time.monotonic() + timeout_s
        stopper = threading.Thread(target=self._dag.teardown, name=f"dagrl-teardown-{self._phase}", daemon=True)
        stopper.start()
        stopper.join(PATIENCE * timeout_s)
        if stopper.is_alive():
            stuck = self._running(max(0.0, deadline - time.monotonic()) / 2)
            kill_running(stuck, self._phase, self._limits, PATIENCE * timeout_s)
            stopper.join(max(0.0, deadline - time.monotonic()) if stuck and self._limits.may_kill else 0.0)

    def _running(self, timeout_s: float) -> list[ActorHandle]:
        """Returns the actors that report a running node of this phase; one that is busy with a plain call does not."""
        reports = {actor.__ray_call__.remote(report): actor for actor in self._bound.actors}
        ready, _ = ray.wait(list(reports), num_returns=len(reports), timeout=timeout_s)
        return [reports[ref] for ref in ready if _runs(ref, self._phase)]


def _runs(ref: Any, phase: str) -> bool:
    try:
        return bool(ray.get(ref).phase == phase)
    except RayError:  # it died
        return False


def prepare_workers(sizes: Mapping[ActorHandle, int], limits: GraphLimits) -> None:
    """Sets the sizes of the channels that each worker writes in graphs compiled next.

    Raises TimeoutError for an actor without a free thread for loops.
    """
    calls = [
        actor.__ray_call__.options(concurrency_group=LOOPS).remote(_prepare_worker, size) for actor, size in sizes.items()
    ]
    try:
        ray.get(calls, timeout=limits.compile_s)
    except GetTimeoutError as late:
        raise TimeoutError(
            f"a worker had no free thread of Ray's for loops within {limits.compile_s:.0f} s. A compiled graph of Ray's own "
            f'engine holds one; make the actor with concurrency_groups={{"{LOOPS}": n}} for n of them (WorkerGroup.create '
            "does), or tear down the graph that somebody else compiled on it"
        ) from late


def _prepare_worker(worker: object, channel_bytes: int) -> None:
    """Runs in the worker."""
    context = DAGContext.get_current()
    context.read_iteration_timeout = IDLE_S
    context.buffer_size_bytes = channel_bytes


@contextmanager
def driver_settings(limits: GraphLimits) -> Iterator[None]:
    """Sets Ray's input size, replays in flight and deadlines for graphs compiled inside."""
    sizes = {"buffer_size_bytes": limits.input_bytes + ENVELOPE_BYTES}
    sizes |= dict.fromkeys(("max_inflight_executions", "max_buffered_results"), limits.max_in_flight)
    timeouts = dict.fromkeys(("submit_timeout", "get_timeout"), max(1, round(limits.replay_s)))
    timeouts["teardown_timeout"] = max(1, round(limits.teardown_s))
    with setting(DAGContext.get_current(), **sizes, **timeouts):
        yield


def compile_dag(bound: BoundGraph, limits: GraphLimits) -> Any:
    """Compiles a bound graph within `limits.compile_s`, on a thread: Ray waits for workers and communicators forever."""
    if not logger.isEnabledFor(logging.DEBUG):
        logging.getLogger(CHATTY).setLevel(logging.CRITICAL)
    compiled: Future[Any] = in_background(bound.dag.experimental_compile, f"dagrl-compile-{bound.phase}")
    try:
        return compiled.result(limits.compile_s)
    except BaseException as error:
        if compiled.done():
            raise
        compiled.add_done_callback(_tear_down_unused)
        if not isinstance(error, TimeoutError):
            raise
        raise TimeoutError(
            f"Ray had not compiled it within compile_s = {limits.compile_s:g} s: a worker does not "
            "answer, or a communicator between GPUs was not made"
        ) from error


def _tear_down_unused(compiled: Future[Any]) -> None:
    """Tears down a graph that was compiled after its deadline."""
    if compiled.exception() is None:
        compiled.result().teardown()
