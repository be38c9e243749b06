"""Spare processes of a worker group: they have imported everything, hold no GPU, and take a lost worker's place at once.

    spares = Spares(start, count=1)
    spares.fill(nodes)                   # starts what is missing, in the background
    actor = spares.take(lost.node)       # None if that node has none

A spare is an actor of the group's class, constructed for rank 0, which has begun `prepare`. The one that takes a place is
constructed again, for the rank of that place.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from dagrl.errors import DeadlineError
from dagrl.machine import VISIBLE, device_index
from dagrl.runtime.worker import WorkerContext

logger = logging.getLogger(__name__)

GPUS = "DAGRL_GPUS"
"""In a spare that took a place: the GPUs of that place, for which Ray has assigned it none."""

ALIVE_S = 1.0
"""How long a spare that has prepared may take to answer, before it counts as dead."""

POLL_S = 0.05


@dataclass(frozen=True)
class _Spare:
    actor: ActorHandle
    node: str
    prepared: Any  # the reference of its `prepare`

    @property
    def alive(self) -> bool:
        """Whether it answers. One that still imports cannot, and counts as alive unless its process has ended."""
        if not ray.wait([self.prepared], timeout=0)[0]:
            return True
        answered = self.actor.__ray_call__.remote(answer)
        if not ray.wait([answered], timeout=ALIVE_S)[0]:
            return False
        try:
            ray.get([self.prepared, answered])
        except ray.exceptions.RayError as error:
            logger.warning("a spare process has failed and is not used: %s", str(error).strip().splitlines()[-1])
            return False
        return True


@dataclass
class Spares:
    """`count` spares on each node. `start(node)` starts an actor there; returns it and the reference of its `prepare`."""

    start: Callable[[str], tuple[ActorHandle, Any]]
    count: int
    _waiting: list[_Spare] = field(default_factory=list)

    def fill(self, nodes: Iterable[str]) -> None:
        """Starts the spares that these nodes lack. Does not wait for them."""
        for node in set(nodes):
            for _ in range(self.count - sum(spare.node == node for spare in self._waiting)):
                actor, prepared = self.start(node)
                self._waiting.append(_Spare(actor, node, prepared))

    @property
    def waiting(self) -> list[tuple[ActorHandle, str]]:
        return [(spare.actor, spare.node) for spare in self._waiting]

    def adopt(self, spares: Iterable[tuple[ActorHandle, str]]) -> None:
        """Adds spares that another driver started, and their nodes."""
        self._waiting += [_Spare(actor, node, actor.__ray_call__.remote(answer)) for actor, node in spares]

    def take(self, node: str) -> ActorHandle | None:
        """Returns a living spare of the node, which is then no longer one."""
        for spare in [spare for spare in self._waiting if spare.node == node]:
            self._waiting.remove(spare)
            if spare.alive:
                return spare.actor
            ray.kill(spare.actor)
        return None

    def end(self) -> None:
        while self._waiting:
            ray.kill(self._waiting.pop().actor)


def answer(worker: object) -> None:
    """Runs in a spare that has nothing else to do."""


def take_place(
    worker: Any, context: WorkerContext, config: object, gpus: tuple[str, ...], former: int, wait_s: float
) -> None:
    """Makes a spare the worker of `context`, on `gpus`. Runs in the spare.

    Waits until the process `former`, which had the place, has ended and freed its GPU memory; DeadlineError if it has not
    within `wait_s`.
    """
    until = time.monotonic() + wait_s
    while former and Path(f"/proc/{former}").exists():
        if time.monotonic() > until:
            raise DeadlineError(f"process {former}, whose place a spare takes, has not ended within {wait_s:g} s")
        time.sleep(POLL_S)
    if gpus:
        os.environ[GPUS] = ",".join(gpus)
        os.environ["LOCAL_RANK"] = str(device_index(gpus, os.environ.get(VISIBLE)))
    type(worker).__init__(worker, context, config)


def assigned_gpus() -> list[str]:
    """Returns the GPUs of this worker's process: those that Ray assigned, or those of the place that it took as a spare."""
    taken = os.environ.get(GPUS)
    return taken.split(",") if taken else list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))
