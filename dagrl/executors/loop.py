"""The loop of a worker in a compiled graph: reads what a node takes, runs it, writes what comes out, node after node.

It stands in for Ray's (`do_exec_tasks` in ray/dag/compiled_dag_node.py), which spends some 10 us a node on schedules,
futures, streams and devices. Graphs with edges between accelerators need those, and keep it.

A loop ends when an edge is closed, as teardown does. Where it ends as a link to another host was lost, it raises that, for
Ray's monitor to see (`CompiledDAG._monitor_failures`): that tears the graph down, as after a death, so that nobody waits on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ray.dag.compiled_dag_node import ExecutableTask, do_exec_tasks
from ray.exceptions import RayChannelError

from dagrl.executors.edge import Edge
from dagrl.executors.node import HasState, state_of


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
    """One turn of a node; a packet that it takes twice is read once."""
    (output,) = task.output_channels
    function, *given = task.task_inputs
    run: Any = function.input_variant
    reads = [channel.read for channel in task.input_channels]

    def turn() -> None:
        packets = [read() for read in reads]
        output.write(run(worker, *[one.resolve(packets) for one in given]))

    def turn_of_one() -> None:
        output.write(run(worker, call, reads[0]()))

    call = given[0].input_variant
    return turn_of_one if len(reads) == 1 and len(given) == 2 else turn
