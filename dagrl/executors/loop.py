"""The loop of a worker in a compiled graph: reads what a node takes, runs it, writes what comes out, node after node.

It stands in for Ray's (`do_exec_tasks` in ray/dag/compiled_dag_node.py), which spends some 10 us a node on schedules,
futures, streams and devices. Graphs with edges between accelerators need those, and keep it.

A loop ends when an edge is closed, as teardown does. Where it ends as a link to another host was lost, it raises that, for
Ray's monitor to see (`CompiledDAG._monitor_failures`): that tears the graph down, as after a death, so that nobody waits on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ray.dag.compiled_dag_node import ExecutableTask, do_exec_tasks
from ray.exceptions import RayChannelError

from dagrl.executors.edge import Edge
from dagrl.executors.memory import MessageTooLargeError
from dagrl.executors.node import HasState, failed_packet, state_of
from dagrl.executors.packet import Packet
from dagrl.executors.pickling import UnreadableError


def run_tasks(worker: HasState, tasks: Sequence[ExecutableTask], *rays: object) -> None:
    """Run the nodes of one worker in order, again and again, until an edge is closed. `rays`: what else Ray's loop takes.

    Raises RayChannelError for a link that was lost.
    """
    for task in tasks:
        task.prepare()
    steps = [_step(worker, task) for task in tasks]
    try:
        while True:
            for step in steps:
                step()
    except RayChannelError:  # closed: the graph is torn down, or lost a worker
        _raise_lost(worker, tasks)


def run_rays_tasks(worker: HasState, tasks: Sequence[ExecutableTask], *rays: object) -> None:
    """Ray's own loop, which ends without a word. Raises RayChannelError for a link that was lost."""
    do_exec_tasks(worker, tasks, *rays)
    _raise_lost(worker, tasks)


def _raise_lost(worker: HasState, tasks: Sequence[ExecutableTask]) -> None:
    edges = [edge for task in tasks for edge in (*task.input_channels, *task.output_channels) if isinstance(edge, Edge)]
    lost = next((edge.lost for edge in edges if edge.lost is not None), None)
    if lost is not None:
        state = state_of(worker)
        error = RayChannelError(f"{state.role} worker {state.rank} {lost}")
        error.time_ns = time.time_ns()  # the teardown that follows looks the same to others: the earliest is the cause
        raise error


def _step(worker: HasState, task: ExecutableTask) -> Callable[[], None]:
    """One turn of a node; a packet that it takes twice is read once.

    What cannot be read or written is a failure of this worker, which goes on.
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
