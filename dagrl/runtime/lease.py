"""The lease of a run's workers: a detached actor that owns them, so that they outlive a driver that dies.

    lease = start_lease(namespace, orphan_s)
    ray.get(lease.take.remote("pid 7 on host-a", token, sure=False))   # a driver; it then calls `renew` every second
    ray.get(lease.create.remote(actor_class, options, arguments))      # instead of actor_class.options(...).remote(...)

Ray ends an actor with its owner. The lease ends, and the workers, placement groups and spares that it made with it, when no
driver has renewed it for `orphan_s`, or when the driver ends it.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group

from dagrl.errors import ConfigError, DeadlineError

NAME = "lease"

LIVE_S = 5.0
"""A driver that has not renewed the lease for this long counts as dead on another host, where no lock tells."""

POLL_S = 0.2


class Lease:
    """See the module's docstring. Runs in an actor of several threads."""

    def __init__(self, orphan_s: float) -> None:
        self._orphan_s = orphan_s
        self._lock = threading.Lock()
        self._driver = self._token = ""
        self._renewed = time.monotonic()
        self._actors: list[ActorHandle] = []
        self._kept: Any = None
        threading.Thread(target=self._expire, name="lease", daemon=True).start()

    def take(self, driver: str, token: str, sure: bool) -> str:
        """Makes `driver` the one that renews the lease. `sure`: the one before it is known to be dead.

        Returns the name of the driver that has the lease: another one, if that may live.
        """
        with self._lock:
            if sure or not self._token or time.monotonic() - self._renewed > LIVE_S:
                self._driver, self._token, self._renewed = driver, token, time.monotonic()
            return self._driver

    def renew(self, token: str) -> bool:
        """Returns whether the driver of `token` still has the lease, and renews it."""
        with self._lock:
            if token == self._token:
                self._renewed = time.monotonic()
            return token == self._token

    def create(self, actor_class: Any, options: dict[str, Any], arguments: tuple[object, ...]) -> ActorHandle:
        """Creates an actor, which ends with the lease."""
        actor: ActorHandle = actor_class.options(**options).remote(*arguments)
        self._actors.append(actor)
        return actor

    def reserve(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        """Creates a placement group, which ends with the lease."""
        return placement_group(bundles, strategy=strategy)

    def keep(self, groups: Any) -> None:
        """Keeps what describes the worker groups, for the next driver."""
        self._kept = groups

    def kept(self) -> Any:
        """Returns what the last driver kept, and ends all other actors of the lease."""
        groups = self._kept or ()
        known = {actor._actor_id for group in groups for actor in group.all_actors}
        for actor in self._actors:
            if actor._actor_id not in known:
                ray.kill(actor)
        self._actors = [actor for actor in self._actors if actor._actor_id in known]
        return groups

    def wait(self) -> None:
        """Never returns: the call fails when the lease ends."""
        threading.Event().wait()

    def _expire(self) -> None:
        while time.monotonic() - self._renewed < self._orphan_s:
            time.sleep(POLL_S)
        os._exit(0)


def ask_lease(call: Any, start_s: float) -> Any:
    """Returns what a lease, or Ray for it, answers to a call. Raises DeadlineError."""
    try:
        return ray.get(call, timeout=start_s)
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineError(f"the lease of the workers did not answer within timeouts.start_s = {start_s:g} s") from error


def start_lease(namespace: str, orphan_s: float, start_s: float) -> ActorHandle:
    """Starts the lease of a run. Raises ConfigError if its namespace has one: workers of a dead driver wait there."""
    actor_class: Any = ray.remote(num_cpus=0, max_concurrency=8, max_restarts=0)(Lease)
    try:
        lease: ActorHandle = actor_class.options(name=NAME, namespace=namespace, lifetime="detached").remote(orphan_s)
    except ValueError as error:  # Ray's for a name that is taken
        raise ConfigError(
            f"{namespace}: workers of a driver that died wait on this cluster: take them over with "
            f"`dagrl attach {namespace}`, or wait until timeouts.orphan_s has passed"
        ) from error
    ask_lease(lease.renew.remote(""), start_s)
    return lease


def find_lease(namespace: str, start_s: float) -> ActorHandle | None:
    """Returns the lease of a namespace; None if it has ended."""
    try:
        lease: ActorHandle = ray.get_actor(NAME, namespace=namespace)
        ask_lease(lease.renew.remote(""), start_s)
    except (ValueError, ray.exceptions.RayActorError):
        return None
    return lease
