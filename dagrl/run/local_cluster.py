"""The processes of a Ray cluster that `ray.init` started on this machine. Only private parts of Ray name them.

This is the only file of dagrl that uses such parts. On a Ray that lacks one of them, Ray starts and ends as it does for
everybody.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from dagrl.attributes import setting

_joined = threading.local()
"""`group`: the process group that children of this thread join; they stay in the process's own without it."""


def _join_group() -> None:
    if group := getattr(_joined, "group", 0):
        os.setpgid(0, group)


os.register_at_fork(after_in_child=_join_group)  # Ray gives `preexec_fn` to subprocess, which then calls these functions

GUARD = "read _; kill -s KILL 0"
"""A shell's program: waits until its standard input ends, as it does with its parent, and kills its process group."""


class ProcessGroup:
    """A process group for Ray's processes and all that they start. It is killed by `kill`, or when this process has ended.

    Ctrl-C in a terminal, `timeout` and many job managers signal the group of the driver. In that, Ray's processes would end
    before the driver has finished its step and saved. Without `kill`, the agents of a raylet that was killed would live for
    another minute, in which they try to tell the cluster of its death; for longer if the GCS hangs.
    """

    def __init__(self) -> None:
        quiet: dict[str, Any] = {"stdin": PIPE, "stdout": DEVNULL, "stderr": DEVNULL, "process_group": 0}
        self._guard = Popen(["/bin/sh", "-c", GUARD], **quiet)  # noqa: S603

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Processes that this thread starts in the block join the group."""
        _joined.group = self._guard.pid
        try:
            yield
        finally:
            _joined.group = 0

    def kill(self) -> None:
        """Kills what is left of the group."""
        with self._guard, suppress(ProcessLookupError):
            os.killpg(self._guard.pid, signal.SIGKILL)


def forget_interrupted_import() -> None:
    """Ends no Ray at exit if its import was interrupted: that would import it again, and fail with a traceback."""
    worker = sys.modules.get("ray._private.worker")
    if worker is not None and "ray" not in sys.modules:
        atexit.unregister(worker.shutdown)


@contextmanager
def lean_node() -> Iterator[None]:
    """Starts nodes without API server, autoscaler and log monitor, which dagrl does not use.

    `ray.init` starts an API server also without a dashboard, and waits for it before it starts the raylet. Workers start
    by `worker_setup.py`, in less time.
    """
    try:
        from ray._private.node import Node
    except ImportError:
        yield
        return

    def none(node: Any, **_: object) -> None:
        node._webui_url = ""  # as without a dashboard

    left_out = ("start_api_server", "start_monitor", "start_log_monitor")
    ours: dict[str, Any] = {name: none for name in left_out if hasattr(Node, name)}
    start_raylet = getattr(Node, "start_raylet", None)
    if start_raylet is not None:

        def start(node: Any, *arguments: Any, **options: Any) -> Any:
            node._ray_params.setup_worker_path = str(Path(__file__).with_name("worker_setup.py"))
            return start_raylet(node, *arguments, **options)

        ours["start_raylet"] = start
    with setting(Node, **ours):
        yield


def cluster_processes() -> list[Popen[Any]]:
    """Returns Ray's own processes, without workers, that `ray.init` started; none if it joined a running cluster."""
    try:
        from ray._private.worker import _global_node

        return [] if _global_node is None else [process for _, process in _global_node.live_processes()]
    except (ImportError, AttributeError):
        return []


ESSENTIAL = ("gcs_server", "raylet")  # processes without which a cluster does not live


def ended_processes(processes: Iterable[Popen[Any]]) -> list[str]:
    """Returns name and pid of each essential process that has ended."""
    named = [(Path(str(process.args[0])).name, process) for process in processes]  # type: ignore[index]
    return [f"{name} (pid {process.pid})" for name, process in named if name in ESSENTIAL and process.poll() is not None]


ANSWER_S = 10.0


def nodes_live(others: Collection[str] = ()) -> bool:
    """Returns whether Ray's GCS answers and counts this process's node, and `others` by their ids, as alive.

    One whose raylet hangs is dead after a while.
    """
    import ray

    try:
        from ray._private.worker import global_worker
        from ray.core.generated.gcs_pb2 import GcsNodeInfo

        nodes = global_worker.gcs_client.get_all_node_info(timeout=ANSWER_S)
    except (ImportError, AttributeError):  # calls of its workers will tell
        return True
    except ray.exceptions.RayError:
        return False
    alive = {node_id.hex() for node_id, node in nodes.items() if node.state == GcsNodeInfo.ALIVE}
    return alive.issuperset({ray.get_runtime_context().get_node_id(), *others})
