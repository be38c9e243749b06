"""The processes of a Ray cluster that `ray.init` started here: Ray tells of them in private alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from subprocess import Popen
from typing import Any

from dagrl.machine import descendants_of


def cluster_processes() -> list[Popen[Any]]:
    """Ray's own processes (not the workers) that `ray.init` has started; none where it joined a cluster."""
    import ray._private.worker

    node = ray._private.worker._global_node
    return [] if node is None else [process for _, process in node.live_processes()]


def kill_with_children(processes: Iterable[Popen[Any]]) -> list[int]:
    """Kill those that are alive, and what they have started (the raylet's agents, workers, and theirs); the pids of all."""
    alive = [process for process in processes if process.poll() is None]
    pids = [pid for process in alive for pid in (*descendants_of(process.pid), process.pid)]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids
