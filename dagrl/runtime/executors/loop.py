"""The loop of a worker in a compiled graph: reads the inputs of each node in turn, runs it, and writes its result.

It replaces Ray's loop (`do_exec_tasks` in ray/dag/compiled_dag_node.py), which spends about 10 us per node on schedules,
futures, streams and devices. Graphs with edges between accelerators need those and keep Ray's loop.

A loop runs on a thread of its own, so that an actor of any class, made with any options, runs any number of graphs: Ray's
threads for loops (`_ray_system`) cannot be added to an actor that exists.

A loop ends when an edge is closed, as teardown does, and then closes all edges of its tasks, so that no process blocks. If
it ended because a link to another host was lost, `wait_for_loop` raises that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from ray.exceptions import RayChannelError

from dagrl.runtime.edges.memory import MessageTooLargeError
from dagrl.runtime.edges.packet import Packet
from dagrl.runtime.edges.pickling import UnreadableError
from dagrl.runtime.executors.edge import Edge
from dagrl.runtime.executors.node import failed_packet, state_of

PASSED = 1 << 62
"""A ticket after all others: what waits for a turn that the driver has not sent gives up."""

END_POLL_S = 0.005
"""How often `end_loops` looks whether they have ended."""


class Task(Protocol):
    """What the loop uses of Ray's `ExecutableTask`: a node with its edges."""

    input_channels: list[Any]
    output_channels: list[Any]
    task_inputs: list[Any]

    def prepare(self, overlap_gpu_communication: bool = False) -> None:
        """Open the edges."""

    def cancel(self) -> None:
        """Close the edges."""


_loops: dict[str, Future[None]] = {}
"""The loops of this process by name, until `wait_for_loop` has told how they ended."""

_tasks: dict[str, Sequence[Task]] = {}
"""The tasks of the loops that run."""


def start_loop(run: Callable[..., None], name: str, worker: object, tasks: Sequence[Task], *rays: object) -> None:
    """Starts the loop `run(worker, tasks, *rays)` of the graph `name` on a thread of its own. Runs in the worker."""
    ended = _loops[name] = Future[None]()
    _tasks[name] = tasks

    def loop() -> None:
        try:
            try:
                run(worker, tasks, *rays)
            finally:
                for task in tasks:
                    task.cancel()
        except BaseException as error:  # raised by `wait_for_loop`
            ended.set_exception(error)
        else:
            ended.set_result(None)
        _tasks.pop(name, None)

    threading.Thread(target=loop, name=f"dagrl-loop-{name}", daemon=True).start()


def wait_for_loop(worker: object, name: str) -> None:
    """Waits for the end of a loop, and raises what ended it. Runs in the worker."""
    if name in _loops:
        try:
            _loops[name].result()
        finally:
            _loops.pop(name, None)


def end_loops(worker: object, timeout_s: float) -> list[str]:
    """Ends all loops, whose driver is dead. Returns those that have not ended in time. Runs in the worker."""
    until = time.monotonic() + timeout_s
    state_of(worker).gate.reset(PASSED)
    for tasks in list(_tasks.values()):
        for task in tasks:
            task.cancel()
    while (running := list(_tasks)) and time.monotonic() < until:
        time.sleep(END_POLL_S)
    for name in set(_loops) - set(running):
        _loops.pop(name, None)
    return running


def loop_runs(worker: object, name: str) -> bool:
    """Whether a loop is running. Runs in the worker."""
    return name in _loops and not _loops[name].done()


def run_tasks(worker: object, tasks: Sequence[Task], *rays: object) -> None:
    """Runs the nodes of one worker in order until an edge is closed. `rays`: the other arguments of Ray's loop.

    Raises RayChannelError if a link was lost.
    """
    for task in tasks:
        task.prepare()
    steps = [_step(worker, task) for task in tasks]
    try:
        while True:
            for step in steps:
                step()
    except RayChannelError:  # closed: the graph is torn down, or lost a worker
        raise_lost_link(worker, tasks)


def raise_lost_link(worker: object, tasks: Sequence[Task]) -> None:
    """Raises RayChannelError if one of the tasks' links to another host was lost."""
    edges = [edge for task in tasks for edge in (*task.input_channels, *task.output_channels) if isinstance(edge, Edge)]
    lost = next((edge.lost for edge in edges if edge.lost is not None), None)
    if lost is not None:
        names = " and ".join(f"{one.role} worker {one.rank}" for one in state_of(worker).members.values())
        error = RayChannelError(f"{names} {lost}")
        error.time_ns = time.time_ns()  # the teardown that follows looks the same to others: the earliest is the cause
        raise error


def _step(worker: object, task: Task) -> Callable[[], None]:
    """Returns one turn of a node, which reads a packet once even if the node takes it twice.

    A packet that cannot be unpickled or pickled is a failure of this worker; the loop goes on.
    """
    (output,) = task.output_channels
    function, *given = task.task_inputs
    run: Any = function.input_variant
    reads = [channel.read for channel in task.input_channels]
    call = given[0].input_variant
    unread = replace(call, unread=True)

    def turn() -> None:
        packets, mine = [], call
        for read in reads:
            try:
                packets.append(read())
            except UnreadableError as error:
                packets.append(packet_of(error))
                mine = unread
        write(run(worker, mine, *[one.resolve(packets) for one in given[1:]]))

    def turn_of_one() -> None:
        try:
            packet = reads[0]()
        except UnreadableError as error:
            write(run(worker, unread, packet_of(error)))
        else:
            write(run(worker, call, packet))

    def packet_of(error: UnreadableError) -> Packet:
        return failed_packet(worker, call, Packet.from_wire(error.content), error)

    def write(packet: Packet) -> None:
        try:
            output.write(packet)
        except (RayChannelError, MessageTooLargeError):
            raise
        except Exception as error:  # of a value that cannot be pickled: nothing was sent
            output.write(failed_packet(worker, call, packet, error))

    return turn_of_one if len(reads) == 1 and len(given) == 2 else turn
