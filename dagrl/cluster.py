"""Ray's own settings, in one place: how a local cluster is started, and what is cleaned up after it.

Token authentication is Ray's default for local clusters and stays on.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dagrl.config import ClusterConfig
from dagrl.errors import RunError
from dagrl.machine import gpus_per_worker

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where Linux keeps POSIX semaphores, not a temporary file of ours
_SEMAPHORE = re.compile(r"sem\.(?:hdr|obj)(\d+)-")
"""Semaphores that compiled graphs make for each channel buffer, with the maker's process id; a killed one leaves them."""

CHATTY = "ray.dag"
"""Ray's logger that shows the traceback of a graph whose worker died; the failure is told by our own error."""

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}

LEAN = {"RAY_prestart_worker_first_driver": "0"}
"""No workers before they are asked for: ours have environments of their own, for which Ray starts others."""

PRIORITY = {"RAY_worker_niceness": "0"}
"""Ray runs workers at niceness 15. With GPUs they launch kernels, and would wait for whatever else the host does."""


@contextmanager
def ray_cluster(config: ClusterConfig, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """A connection to `config.address`, or a cluster of this machine's own that ends with the block.

    `environment` is set in every worker process. Semaphores that killed workers left behind are removed at the end.
    """
    os.environ.update(QUIET | LEAN | (PRIORITY if gpus_per_worker(config) else {}))
    import ray

    before = semaphores()
    local = config.address is None
    if not logger.isEnabledFor(logging.DEBUG):
        logging.getLogger(CHATTY).setLevel(logging.CRITICAL)
    try:
        ray.init(
            address=config.address or "local",
            num_cpus=config.num_cpus if local else None,
            num_gpus=config.num_gpus if local else None,
            object_store_memory=config.object_store_memory if local else None,
            include_dashboard=False if local else None,
            _temp_dir=config.temp_dir if local else None,
            logging_level=logging.ERROR,
            log_to_driver=False,
            runtime_env={"env_vars": {**QUIET, **(environment or {})}},
        )
    except SystemExit as ended:  # while it starts, Ray's own handler turns SIGTERM into this
        if ended.code == signal.SIGTERM:
            raise KeyboardInterrupt from ended
        raise
    except Exception as error:  # Ray raises plain exceptions here
        where = f"join the cluster at {config.address}" if config.address else "start on this machine"
        raise RunError(
            f"Ray could not {where}: {error}. Its logs are in session_latest/logs of /tmp/ray (or cluster.temp_dir)"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
        if local:
            remove_orphaned_semaphores(semaphores() - before)


def remove_orphaned_semaphores(names: set[str]) -> None:
    """Remove the given semaphores of `/dev/shm` whose maker, named by its process id, has ended without doing so."""
    orphans = {name for name in names if not _is_alive(name)}
    for name in orphans:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    if orphans:
        logger.debug("removed %d semaphores that killed workers left behind", len(orphans))


def semaphores() -> set[str]:
    """Names of the compiled graphs' semaphores on this machine."""
    if not SHARED_MEMORY.is_dir():
        return set()
    return {entry.name for entry in SHARED_MEMORY.iterdir() if _SEMAPHORE.match(entry.name)}


def _is_alive(name: str) -> bool:
    found = _SEMAPHORE.match(name)
    assert found, name
    return Path("/proc", found[1]).exists()
