"""Keeps Ray alive on this machine after the death of the driver, for another one to take over (`timeouts.orphan_s`).

    python -m dagrl.run.keeper RUN_DIRECTORY SETTINGS

Starts Ray and the lease of the run's workers (`dagrl.runtime.lease`), and writes one line of JSON with the address to its
standard output. Ends Ray, with all that Ray started, when the lease ends or at SIGTERM. So does the death of this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from dagrl.config import ClusterConfig, TimeoutConfig
from dagrl.errors import DagrlError, RunError
from dagrl.run.cluster import ray_cluster
from dagrl.run.local_cluster import cluster_processes, ended_processes

POLL_S = 0.2


def start_keeper(directory: Path, cluster: ClusterConfig, timeouts: TimeoutConfig) -> tuple[subprocess.Popen[str], str]:
    """Starts a keeper in a session of its own. Returns its process and Ray's address. Raises RunError."""
    settings = json.dumps([cluster.model_dump(mode="json"), timeouts.teardown_s, timeouts.orphan_s, timeouts.start_s])
    command = [sys.executable, "-m", "dagrl.run.keeper", str(directory), settings]
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # workers import what this process can import
    keeper = subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    late = threading.Timer(timeouts.start_s, keeper.kill)
    late.start()
    try:
        assert keeper.stdout is not None
        with keeper.stdout:
            line = keeper.stdout.readline()
    except BaseException:
        keeper.kill()
        raise
    finally:
        late.cancel()
    if not line.endswith("\n"):
        raise RunError(
            f"the process that keeps Ray ended with exit code {keeper.wait()} (timeouts.start_s: {timeouts.start_s:g})"
        )
    answer = json.loads(line)
    if "error" in answer:
        keeper.wait()
        raise RunError(answer["error"])
    return keeper, answer["address"]


def keeps(pid: int, directory: Path) -> bool:
    """Whether the process is the keeper of this run."""
    try:
        return str(directory).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def end_keeper(pid: int | None, keeper: subprocess.Popen[str] | None, directory: Path, timeout_s: float) -> None:
    """Ends a keeper (None: there is none), and Ray with it. `keeper`: as a child of this process."""
    until = time.monotonic() + timeout_s
    for number in (signal.SIGTERM, signal.SIGKILL):
        if pid is not None and keeps(pid, directory):
            os.kill(pid, number)
        while pid is not None and keeps(pid, directory) and time.monotonic() < until:
            time.sleep(POLL_S / 10)
    if keeper is not None:
        keeper.wait(timeout_s)


def main() -> None:
    """Keeps Ray until the lease ends or a process of Ray has ended."""
    namespace, settings = sys.argv[1:]
    cluster, teardown_s, orphan_s, start_s = json.loads(settings)
    try:
        with ray_cluster(ClusterConfig(**cluster), teardown_s=teardown_s):
            import ray

            from dagrl.runtime.lease import start_lease

            ended = start_lease(namespace, orphan_s, start_s).wait.remote()
            signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # after Ray has set its own
            _answer({"address": ray.get_runtime_context().gcs_address})
            while not ray.wait([ended], timeout=POLL_S)[0] and not ended_processes(cluster_processes()):
                pass
    except DagrlError as error:
        _answer({"error": str(error)})


def _answer(content: dict[str, str]) -> None:
    """Tells the driver, if it still listens."""
    try:
        sys.stdout.write(json.dumps(content) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
