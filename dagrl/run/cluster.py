"""Starts or joins a Ray cluster with our settings, and cleans up after it.

Token authentication is Ray's default for local clusters and stays on.
"""

import atexit
import logging
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from dagrl.config import ClusterConfig
from dagrl.errors import ConfigError, RunError, UserError
from dagrl.files import require_writable
from dagrl.imports import gc_paused
from dagrl.machine import DEV_SHM, gpu_count
from dagrl.run.local_cluster import ProcessGroup, lean_node
from dagrl.run.stop import ignoring_signals, keep_handlers

logger = logging.getLogger(__name__)

_SEMAPHORE = re.compile(r"sem\.(?:hdr|obj)(\d+)-")
"""The semaphores in `/dev/shm` that compiled graphs create for each channel buffer, with the process id of their creator. A
killed process leaves them."""

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}

LEAN = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_process_group_cleanup_enabled": "0",
}
"""Do not prestart workers: ours have their own environments, for which Ray starts other processes. Do not report calls: GCS
keeps the last 100,000 reports, and grows by 7 KB in a GRPO step. Do not give each worker a process group: they stay in the
`ProcessGroup`, and so end with the driver, also those that hang.
"""

PRIORITY = {"RAY_worker_niceness": "0"}
"""Ray runs workers at niceness 15. With GPUs they launch kernels, which other processes of the host would delay."""

SLOW_NODE = "timed out during startup"
"""Ray's message for a node that does not answer within 30 s, as on a busy machine. No setting changes this time."""

LOGS = "session_latest/logs of Ray's directory ($RAY_TMPDIR, else /tmp/ray)"

SOCKET = "ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""The longest name of a socket below Ray's directory."""

FILES, FILES_PER_WORKER = 160, 8
"""Files that a worker may need open, and how many more for each worker of the run. Megatron's had up to 138 in SFT with 2
workers and 192 with 8, in GRPO 174 with 3 and 202 with 8, all without GPUs."""

SOCKET_BYTES = 107  # longest path of a Unix socket (`sun_path` in unix(7), without its last null byte)
LOCAL = ("localhost", "127.0.0.1", "[::1]")  # names of this host, for which Ray takes its address in the network

CONNECT_S = 10.0
"""Seconds that a cluster may take to accept a connection. Ray itself would try for minutes."""

LARGEST_PORT = 65535

POLL_S = 0.01  # seconds between two restorations of the signal handlers while Ray ends

AUTH_MODE = "RAY_AUTH_MODE"
"""Whether Ray sends `~/.ray/auth_token`. If unset, Ray sends it only to clusters that it starts or discovers."""


def gpus_per_worker(config: ClusterConfig) -> float:
    """Returns the number of GPUs that each worker requests from Ray."""
    if config.gpus_per_worker is not None:
        return config.gpus_per_worker
    return 1.0 if gpus_here(config) else 0.0


def gpus_here(config: ClusterConfig) -> int:
    """Returns the GPUs of a cluster started on this machine."""
    return gpu_count() if config.num_gpus is None else config.num_gpus


def check_open_files(workers: int) -> None:
    """Raises ConfigError if a process may open fewer files than one of so many workers needs."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES + FILES_PER_WORKER * workers
    if most != resource.RLIM_INFINITY and most < needed:
        raise ConfigError(
            f"processes may open {most} files (`ulimit -Hn`); each of {workers} workers needs {needed}. Raise the "
            "limit, in a container by --ulimit nofile=65536, or choose smaller layouts"
        )


def check_ray_directory() -> None:
    """Raises ConfigError, naming the variable, if Ray cannot make its sockets and logs in its directory for temporary files,
    or its token in the home directory. Ray itself says so only when it starts.
    """
    variable = next((name for name in ("RAY_TMPDIR", "TMPDIR") if os.environ.get(name)), "")
    directory = os.environ.get(variable, "/tmp")  # noqa: S108  # as Ray's `get_user_temp_dir`
    longest = len(os.fsencode(f"{directory}/{SOCKET}"))
    if longest > SOCKET_BYTES:
        raise ConfigError(
            f"{variable} is {directory!r}, where Ray's sockets would have paths of {longest} bytes; the system takes "
            f"{SOCKET_BYTES}. Set RAY_TMPDIR to a directory with a shorter name, such as /tmp"
        )
    require_writable(Path(directory), f"{variable or 'RAY_TMPDIR'} (Ray's directory)")
    given = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    needs_token = os.environ.get(AUTH_MODE, "token").lower() == "token" and not given
    if needs_token and not (Path.home() / ".ray" / "auth_token").exists():
        require_writable(Path.home() / ".ray", f"HOME, where Ray writes ~/.ray/auth_token unless {AUTH_MODE}=disabled")


def require_no_ray() -> None:
    """Raises UserError if Ray already runs in this process."""
    import ray

    if ray.is_initialized():
        raise UserError(
            "Ray already runs in this process; expected none: dagrl starts or joins a cluster itself and leaves it at the "
            "end. Call ray.shutdown() first, or run dagrl in a process of its own"
        )


@contextmanager
def ray_cluster(
    config: ClusterConfig,
    environment: Mapping[str, str] | None = None,
    *,
    store_bytes: int = 256 << 20,
    teardown_s: float = 8.0,
) -> Iterator[None]:
    """Joins the cluster at `config.address`, or starts one on this machine that ends with the block.

    `environment` is set in every worker process. `store_bytes`: of the object store of a cluster that it starts. At the end,
    semaphores that killed workers left behind are removed, and a local cluster that has not ended within `teardown_s` is
    killed. Raises UserError if nothing listens at the address, or Ray already runs in this process, which is left alone;
    RunError if Ray fails to join or to start.
    """
    require_no_ray()
    if config.address:
        _require_listener(config.address)
    elif (elsewhere := os.environ.get("RAY_ADDRESS")) and elsewhere != "local":
        logger.warning(
            "RAY_ADDRESS is %s, but cluster.address is null: Ray starts on this machine. Set cluster.address=%s to join it",
            elsewhere,
            elsewhere,
        )
    os.environ.update(QUIET | ({} if config.address else LEAN) | (PRIORITY if gpus_per_worker(config) else {}))
    before = semaphores()
    try:
        group = _start(config, environment or {}, store_bytes, teardown_s)
    except SystemExit as ended:  # Ray's own handler turns SIGTERM into this during start
        if ended.code == signal.SIGTERM:
            raise KeyboardInterrupt from ended
        raise
    except Exception as error:  # Ray raises plain exceptions here
        raise RunError(f"{_could_not(config)}: {error}. Its logs are in {LOGS}") from error
    try:
        yield
    finally:
        with gc_paused():  # freeing an `ObjectRef` during shutdown ends the process
            _end(group, teardown_s)
        if group is not None:
            remove_orphaned_semaphores(semaphores() - before)


def _require_listener(address: str) -> None:
    """Raises ConfigError if nothing listens at a `host:port`; others, such as `auto`, are Ray's to look up."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return
    if int(port) > LARGEST_PORT:  # the C library would connect to its lower 16 bits
        raise ConfigError(f"cluster.address is {address!r}; expected a port of at most {LARGEST_PORT}")
    import ray

    reasons = []
    for reached in (host.strip("[]"), *([ray.util.get_node_ip_address()] if host in LOCAL else [])):
        try:
            socket.create_connection((reached, int(port)), CONNECT_S).close()
            return
        except OSError as error:
            reasons.append(error)
    raise ConfigError(
        f"no Ray cluster answers at {address} ({reasons[0]}); start one there (ray start --head), or correct cluster.address"
    )


def _start(
    config: ClusterConfig, environment: Mapping[str, str], store_bytes: int, teardown_s: float, *, again: bool = True
) -> ProcessGroup | None:
    """Joins a cluster, or starts one and returns its processes' group. Ends what it has started if it raises.

    Starts `again`, once, if the node was too slow for Ray.
    """
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)  # warns that a thread cannot set the handler of SIGTERM
    group = None if config.address else ProcessGroup()
    try:
        with nullcontext() if group is None else group.joined(), lean_node():
            ray.init(**_arguments(config, store_bytes), runtime_env={"env_vars": {**QUIET, **environment}})
    except BaseException as error:
        _end(group, teardown_s)
        if config.address or not again or SLOW_NODE not in str(error):  # Ray raises plain exceptions
            raise
        logger.warning("Ray's node did not answer within the 30 s that Ray gives it; starting another")
        return _start(config, environment, store_bytes, teardown_s, again=False)
    return group


def _arguments(config: ClusterConfig, store_bytes: int) -> dict[str, Any]:
    """Returns the arguments of `ray.init`. A running cluster has its own sizes."""
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if config.address:
        return {"address": config.address, **quiet}
    return {
        "address": "local",
        "num_cpus": config.num_cpus,
        "num_gpus": config.num_gpus,
        "object_store_memory": store_bytes,
        "include_dashboard": False,
        **quiet,
    }


def _could_not(config: ClusterConfig) -> str:
    """Returns what failed. A cluster may ask for a token, which Ray does not say."""
    if not config.address:
        return "Ray could not start on this machine"
    where = f"Ray could not join the cluster at {config.address}"
    return where if AUTH_MODE in os.environ else f"{where} (if it asks for a token, set {AUTH_MODE}=token and try again)"


def _end(group: ProcessGroup | None, teardown_s: float) -> None:
    """Leaves the cluster, and kills what is left of one that was started."""
    try:
        _shutdown(group, teardown_s)
    finally:
        if group is not None:
            group.kill()


def _shutdown(group: ProcessGroup | None, teardown_s: float) -> None:
    """Runs `ray.shutdown` in a thread with a deadline, because it waits for the raylet without one.

    An interrupt during it kills the cluster at once; later ones are ignored.
    """
    import ray

    ending = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
    ending.start()
    try:
        _join(ending, teardown_s)
    except KeyboardInterrupt:
        with ignoring_signals():
            if group is not None:
                group.kill()
            _join(ending, teardown_s)
        raise
    if not ending.is_alive():
        return
    if group is not None:
        group.kill()
    what = "it was left running" if group is None else "its processes were killed"
    logger.warning("Ray did not end within timeouts.teardown_s = %g s: %s", teardown_s, what)
    _join(ending, teardown_s)  # returns once the raylet has ended
    if ending.is_alive():
        atexit.unregister(ray.shutdown)  # Ray's exit handler would wait for the thread


def _join(ending: threading.Thread, timeout_s: float) -> None:
    """Waits for `ray.shutdown`, which takes away the handlers of signals: the next one would kill this process."""
    until = time.monotonic() + timeout_s
    while ending.is_alive() and time.monotonic() < until:
        ending.join(POLL_S)
        keep_handlers()


def remove_orphaned_semaphores(names: set[str]) -> None:
    """Removes those of the semaphores `names` whose creator, identified by its process id, has ended."""
    creators = {name: match[1] for name in names if (match := _SEMAPHORE.match(name))}
    orphans = [name for name, pid in creators.items() if not Path("/proc", pid).exists()]
    for name in orphans:
        (DEV_SHM / name).unlink(missing_ok=True)
    if orphans:
        logger.debug("removed %d semaphores that killed workers left behind", len(orphans))


def semaphores() -> set[str]:
    """Returns the names of the semaphores of compiled graphs on this machine."""
    if not DEV_SHM.is_dir():
        return set()
    return {entry.name for entry in DEV_SHM.iterdir() if _SEMAPHORE.match(entry.name)}
