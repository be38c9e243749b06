"""Ray's own settings, in one place: how a local cluster is started, and what is cleaned up after it.

Token authentication is Ray's default for local clusters and stays on.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

from dagrl.config import ClusterConfig
from dagrl.errors import RunError
from dagrl.executors.local_cluster import cluster_processes, kill_with_children
from dagrl.garbage import no_collections
from dagrl.machine import DEV_SHM, gpus_per_worker

logger = logging.getLogger(__name__)

_SEMAPHORE = re.compile(r"sem\.(?:hdr|obj)(\d+)-")
"""In `/dev/shm`, the semaphores that compiled graphs make for each channel buffer, with their maker's process id: one that
is killed leaves them."""

CHATTY = "ray.dag"
"""Ray's logger that shows the traceback of a graph whose worker died; the failure is told by our own error."""

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}

LEAN = {"RAY_prestart_worker_first_driver": "0"}
"""No workers before they are asked for: ours have environments of their own, for which Ray starts others."""

PRIORITY = {"RAY_worker_niceness": "0"}
"""Ray runs workers at niceness 15. With GPUs they launch kernels, and would wait for whatever else the host does."""

AUTH_MODE = "RAY_AUTH_MODE"
"""Says whether Ray sends `~/.ray/auth_token`: unset, it does to clusters that it starts or finds alone."""


@contextmanager
def ray_cluster(
    config: ClusterConfig, environment: Mapping[str, str] | None = None, *, teardown_s: float = 8.0
) -> Iterator[None]:
    """A connection to `config.address`, or a cluster of this machine's own that ends with the block.

    `environment` is set in every worker process. Semaphores that killed workers left behind are removed at the end. A
    cluster of our own that has not ended within `teardown_s` is killed.
    """
    os.environ.update(QUIET | LEAN | (PRIORITY if gpus_per_worker(config) else {}))
    import ray

    before = semaphores()
    if not logger.isEnabledFor(logging.DEBUG):
        logging.getLogger(CHATTY).setLevel(logging.CRITICAL)
    try:
        ray.init(**_arguments(config), runtime_env={"env_vars": {**QUIET, **(environment or {})}})
    except SystemExit as ended:  # while it starts, Ray's own handler turns SIGTERM into this
        if ended.code == signal.SIGTERM:
            raise KeyboardInterrupt from ended
        raise
    except Exception as error:  # Ray raises plain exceptions here
        what = f"{_could_not(config)}: {error}. Its logs are in session_latest/logs of /tmp/ray (or cluster.temp_dir)"
        raise RunError(what) from error
    processes = cluster_processes()
    try:
        yield
    finally:
        with no_collections():  # an `ObjectRef` that is freed while Ray shuts down ends the process
            _shutdown(processes, teardown_s)
        if not config.address:
            remove_orphaned_semaphores(semaphores() - before)


def _arguments(config: ClusterConfig) -> dict[str, Any]:
    """Of `ray.init`: a cluster that runs already has sizes of its own."""
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if config.address:
        return {"address": config.address, **quiet}
    return {
        "address": "local",
        "num_cpus": config.num_cpus,
        "num_gpus": config.num_gpus,
        "object_store_memory": config.object_store_memory,
        "include_dashboard": False,
        "_temp_dir": config.temp_dir,
        **quiet,
    }


def _could_not(config: ClusterConfig) -> str:
    """What failed, and why it may have: `ray start` asks for tokens where there is one, and who joins is not told."""
    if not config.address:
        return "Ray could not start on this machine"
    where = f"Ray could not join the cluster at {config.address}"
    return where if AUTH_MODE in os.environ else f"{where} (if it asks for a token, set {AUTH_MODE}=token and try again)"


def _shutdown(processes: Sequence[Popen[Any]], teardown_s: float) -> None:
    """`ray.shutdown`, which waits for the raylet for ever: beside us, so that it has a deadline."""
    import ray

    ending = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
    ending.start()
    ending.join(teardown_s)
    if not ending.is_alive():
        return
    killed = kill_with_children(processes)
    what = f"its processes {killed} are killed" if killed else "it is left as it is"
    logger.warning("Ray did not end within timeouts.teardown_s = %g s: %s", teardown_s, what)
    ending.join(teardown_s)  # it returns as soon as the raylet is gone
    if ending.is_alive():
        atexit.unregister(ray.shutdown)  # Ray's own, which would wait for the thread


def remove_orphaned_semaphores(names: set[str]) -> None:
    """Remove the given semaphores of `/dev/shm` whose maker, named by its process id, has ended without doing so."""
    orphans = {name for name in names if not _is_alive(name)}
    for name in orphans:
        (DEV_SHM / name).unlink(missing_ok=True)
    if orphans:
        logger.debug("removed %d semaphores that killed workers left behind", len(orphans))


def semaphores() -> set[str]:
    """Names of the compiled graphs' semaphores on this machine."""
    if not DEV_SHM.is_dir():
        return set()
    return {entry.name for entry in DEV_SHM.iterdir() if _SEMAPHORE.match(entry.name)}


def _is_alive(name: str) -> bool:
    found = _SEMAPHORE.match(name)
    assert found, name
    return Path("/proc", found[1]).exists()
