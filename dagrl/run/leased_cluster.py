"""Ray and the lease of a run's workers, which outlive a driver that dies by `timeouts.orphan_s`.

    with leased_cluster(config, attach=False) as lease:     # `attach`: those of a driver that has died
        ...                                                 # workers are started with lease.owner
        lease.keep(groups)                                  # for a next driver
        lease.check()                                       # raises ClusterError if the lease has ended

`lease.json` in the run's directory tells where they are. A driver that dies leaves it there.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING

from dagrl.config import Config
from dagrl.config.file import load_run_config
from dagrl.errors import ClusterError, ConfigError
from dagrl.files import write_whole
from dagrl.run.cluster import ray_cluster
from dagrl.run.keeper import end_keeper, keeps, start_keeper
from dagrl.run.local_cluster import use_own_token
from dagrl.telemetry.record import RunPaths, check_not_running

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from dagrl.runtime.takeover import KeptGroup
    from dagrl.runtime.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

FILE, FORMAT = "lease.json", 1

BEAT_S = 1.0
"""How often the driver renews the lease."""


@dataclass(frozen=True)
class LeaseFile:
    """Where the workers of a run are: Ray's address, the driver's host, and the process there that keeps Ray (None: nobody
    does, the cluster is the user's). The driver touches the file whenever it renews the lease."""

    address: str
    host: str
    keeper: int | None
    orphan_s: float
    format: int = FORMAT

    def may_wait(self, directory: Path) -> bool:
        """Whether the workers may be alive."""
        if self.keeper is not None and self.host == socket.gethostname():
            return keeps(self.keeper, directory)
        return time.time() < (directory / FILE).stat().st_mtime + self.orphan_s


def read_lease(directory: Path) -> LeaseFile | None:
    """Returns the content of a run's `lease.json`; None without one. Raises ConfigError if this version cannot read it."""
    file = directory / FILE
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_bytes())
        if content["format"] != FORMAT:
            raise ConfigError(f"{file} has format {content['format']!r}; this version of dagrl reads format {FORMAT}")
        return LeaseFile(**content)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file} is damaged ({error}); remove it if no workers of the run live") from error


def refuse_orphans(directory: Path) -> None:
    """Raises ConfigError if workers of a driver that died may wait for another one. The caller has locked the directory."""
    found = read_lease(directory)
    if found is not None and found.may_wait(directory):
        raise ConfigError(
            f"{directory}: the workers of a driver that died wait for another one at {found.address}: take them over with "
            f"`dagrl attach {directory}`, or wait until timeouts.orphan_s = {found.orphan_s:g} s have passed"
        )


def orphaned_config(directory: Path) -> Config:
    """Returns the configuration of a run whose workers may wait for a driver, for `dagrl attach`.

    Raises ConfigError if `directory` is no run's, if its driver lives, or if no workers can wait.
    """
    directory = directory.absolute()
    moved = {"output_dir": str(directory.parent), "name": directory.name, "checkpointing.resume": True}
    config = load_run_config(directory).with_keys(moved)
    check_not_running(RunPaths.of(config), "only a run whose driver has died can be attached to")
    waiting_lease(directory)
    return config


def waiting_lease(directory: Path) -> LeaseFile:
    """Returns the lease of workers that may wait for a driver. Raises ConfigError if none wait."""
    found = read_lease(directory)
    if found is None or not found.may_wait(directory):
        raise _nothing_waits(directory)
    return found


def _nothing_waits(directory: Path) -> ConfigError:
    return ConfigError(
        f"{directory}: no workers wait for a driver: the run has ended, or its driver died longer ago than "
        "timeouts.orphan_s (with 0, workers end with it). To go on from the newest checkpoint: "
        f"dagrl train {directory / 'config.yaml'} checkpointing.resume=true"
    )


class HeldLease:
    """The lease `owner` of the workers, as this driver holds it. `file` is its `lease.json`."""

    def __init__(self, owner: ActorHandle, file: Path, orphan_s: float, start_s: float) -> None:
        self.owner, self._file, self._orphan_s, self._start_s = owner, file, orphan_s, start_s
        self._token = uuid.uuid4().hex
        self._kept: list[object] = []
        self._lost = ""
        self._ended = threading.Event()

    def take(self, sure: bool) -> None:
        """Makes this process the driver. Raises ConfigError if another one may live; `sure`: none does."""
        from dagrl.runtime.lease import ask_lease

        me = f"pid {os.getpid()} on {socket.gethostname()}"
        holder = ask_lease(self.owner.take.remote(me, self._token, sure), self._start_s)
        if holder != me:
            raise ConfigError(f"{self._file.parent}: its driver lives ({holder}); expected: one that has died")

    def keep(self, groups: Sequence[WorkerGroup]) -> None:
        """Keeps the groups for the next driver, if they have changed."""
        from dagrl.runtime.takeover import keep

        kept = [keep(group) for group in groups]
        ids: list[object] = [actor._actor_id for group in kept for actor in group.all_actors]
        if ids != self._kept:
            self.owner.keep.remote(kept)
            self._kept = ids

    def kept(self) -> list[KeptGroup]:
        """Returns the groups of the last driver."""
        from dagrl.runtime.lease import ask_lease

        found: list[KeptGroup] = list(ask_lease(self.owner.kept.remote(), self._start_s))
        return found

    def check(self) -> None:
        """Raises ClusterError if the lease has ended, and with it all workers."""
        if self._lost:
            raise ClusterError(f"{self._lost}. To go on: checkpointing.resume=true")

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renews the lease during the block."""
        thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(BEAT_S)

    def _renew(self) -> None:
        import ray

        while not self._ended.wait(BEAT_S):
            try:
                mine = ray.get(self.owner.renew.remote(self._token), timeout=self._orphan_s)
            except ray.exceptions.RayError as error:
                self._lost = f"the lease of the workers ended, and they with it: {str(error).splitlines()[0]}"
                return
            if not mine:  # this process was stopped for long; it must not touch what is another driver's now
                logger.error("another driver has taken over the workers; this one ends")
                os._exit(1)
            with suppress(OSError):  # a full or slow disk does not concern the lease
                os.utime(self._file)


@contextmanager
def leased_cluster(config: Config, *, attach: bool) -> Iterator[HeldLease]:
    """Starts Ray (or joins `cluster.address`) and a lease; with `attach`, joins those of a driver that has died.

    Ends them after the block, but not if this process is killed in it. Raises ConfigError if there is nothing to attach to.
    The caller has locked the run's directory.
    """
    directory, here = RunPaths.of(config).directory, socket.gethostname()
    keeper: Popen[str] | None = None
    if attach:
        found = waiting_lease(directory)
    else:
        address = config.cluster.address
        if not address:
            keeper, address = start_keeper(directory, config.cluster, config.timeouts)
        found = LeaseFile(address, here, keeper.pid if keeper else None, config.timeouts.orphan_s)
    taken = not attach
    try:
        if found.keeper is not None:
            use_own_token()
        cluster = config.cluster.with_keys({"address": found.address})
        with ray_cluster(cluster, teardown_s=config.timeouts.teardown_s):
            import ray

            from dagrl.runtime.lease import find_lease, start_lease

            starts, start_s = not attach and keeper is None, config.timeouts.start_s
            namespace = str(directory)
            owner = start_lease(namespace, found.orphan_s, start_s) if starts else find_lease(namespace, start_s)
            if owner is None:
                raise _nothing_waits(directory)
            held = HeldLease(owner, directory / FILE, found.orphan_s, start_s)
            held.take(sure=found.host == here)
            taken = True
            write_whole(directory / FILE, json.dumps(asdict(replace(found, host=here))))
            try:
                with held.renewed():
                    yield held
            finally:
                if found.keeper is None:
                    ray.kill(owner)
    finally:
        if taken:
            end_keeper(found.keeper, keeper, directory, 2 * config.timeouts.teardown_s)
            (directory / FILE).unlink(missing_ok=True)
