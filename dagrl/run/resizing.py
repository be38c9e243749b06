"""Lets generation engines join and leave a run, on request of `dagrl scale`.

    text = resizing.scale(3, timeout_s=600.0)    # on a thread of `dagrl.run.control`: refuses, or starts engines and waits

and on the thread of the loop, between two quanta, in this order:

    change = resizing.take_change()              # once new engines have started
    resizing.resize()                            # all workers rest: graphs for the new engines and the refit
    resizing.finish()                            # all are connected for refits; the caller refits next

Training does not stop: engines start in the background, and the change is made where a refit is due or training waits.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import ray

from dagrl.config import Config
from dagrl.config.roles import GENERATION
from dagrl.config.settings import with_engines
from dagrl.errors import DeadlineError, LayoutError, RunError
from dagrl.machine import available_memory, private_memory
from dagrl.rl.rollout.engines import Change
from dagrl.run.cluster import gpus_per_worker
from dagrl.run.fleet import Fleet
from dagrl.run.preflight import check_machine
from dagrl.run.replays import Replays
from dagrl.runtime.answers import end_workers
from dagrl.runtime.deadline import in_background
from dagrl.runtime.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""How often a request looks whether its session has ended."""


@dataclass
class _Asked:
    """A request: how many engines there were and shall be, which of them stay, and how far it is."""

    before: int
    engines: int
    kept: tuple[int, ...]
    until: float = math.inf  # `time.monotonic`
    joining: WorkerGroup | None = None
    started_s: float = 0.0
    started: bool = False
    begun: bool = False
    joined: bool = False
    lost: RunError | None = None
    """Why it cannot be done any more."""
    done: Future[None] = field(default_factory=Future)


class Resizing:
    """See the module's docstring. One request at a time."""

    def __init__(self, config: Config, fleet: Fleet, group: WorkerGroup, replays: Replays) -> None:
        self._config, self._fleet, self._group, self._replays = config, fleet, group, replays
        self._asked: _Asked | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._over = threading.Event()
        self._over.set()

    def scale(self, engines: int, timeout_s: float) -> str:
        """Makes `engines` the number of engines; returns how long that took, as text.

        Raises LayoutError or GraphError if that cannot be, before anything changes. Raises DeadlineError after `timeout_s`
        and RunError if the session ends; the number is then what it was, unless the change had begun.
        """
        begin = time.monotonic()
        asked = self._accept(engines, begin + timeout_s)
        try:
            if engines > asked.before:
                asked.joining = self._group.start_shards(engines - asked.before, partial(self._check, asked))
                asked.started_s = time.monotonic() - begin
            asked.started = True
            self._wait(asked)
        except BaseException:
            if asked.joining is not None and not asked.joined:
                self._group.end_shards(asked.joining, self._config.timeouts.teardown_s / 2)
            raise
        finally:
            with self._lock:
                self._asked = None if self._asked is asked else self._asked
            self._over.set()
        started = f"; the new ones had started after {asked.started_s:.1f} s" if asked.started_s else ""
        return f"done after {time.monotonic() - begin:.1f} s: {engines} engines, before {asked.before}{started}"

    @property
    def ready(self) -> bool:
        """Whether engines can leave or join now."""
        return self._asked is not None and self._asked.started and not self._asked.begun

    @property
    def begun(self) -> bool:
        """Whether a change was taken, and its engines are not connected yet."""
        return self._asked is not None and self._asked.begun and not self._asked.done.done()

    @property
    def due(self) -> bool:
        """Whether a change was taken, and its engines have not joined or left yet."""
        return self._asked is not None and self._asked.begun and not self._asked.joined

    def take_change(self) -> Change | None:
        """Begins the change that is ready, if there is one. It can no longer be withdrawn."""
        with self._lock:
            asked = self._asked
            if asked is None or not self.ready:
                return None
            asked.begun = True
            return Change(asked.kept, asked.engines)

    def resize(self) -> None:
        """Makes the change that was taken. All workers rest. Engines that leave end in the background."""
        asked = self._asked
        assert asked is not None and asked.begun
        leaving = [(self._group.role, self._replays.scheduler.resize(GENERATION, asked.kept, asked.joining))]
        asked.joined = True
        # at once: NCCL ends a channel on all of its ranks, and the others open the next one now
        in_background(partial(end_workers, leaving, self._config.timeouts.teardown_s / 2), "end-engines")
        self._replays.devices += (asked.engines - asked.before) * self._group.layout.shard_size
        self._fleet.engines = asked.engines

    def finish(self) -> None:
        """Answers the request, if one has begun."""
        asked = self._asked
        if asked is None or not asked.begun:
            return
        logger.info("%d generation engines, before %d", asked.engines, asked.before)
        self._fleet.settle()
        with self._lock:
            self._asked = None
        asked.done.set_result(None)

    def drop(self, shards: set[int]) -> None:
        """Lets engines that are lost leave at the next refit, and gives up a request under way."""
        with self._lock:
            if self._asked is not None:
                self._asked.lost = RunError(f"the engines of shards {sorted(shards)} were lost meanwhile; ask again")
            before = self._group.layout.dp
            kept = tuple(shard for shard in range(before) if shard not in shards)
            self._asked = _Asked(before, len(kept), kept, started=True)

    def end(self) -> None:
        """Gives up a request at the end of a session, and ends the engines that it started."""
        with self._lock:
            self._ended = True
        self._over.wait(self._config.timeouts.teardown_s)

    def _accept(self, engines: int, until: float) -> _Asked:
        with self._lock:
            if self._ended:
                raise RunError("the run ends, or restarts")
            if self._asked is not None:
                raise LayoutError(f"it is being scaled to {self._asked.engines} engines; ask again when that is done")
            before = self._group.layout.dp
            self._check_layout(engines, before)
            self._asked = _Asked(before, engines, tuple(range(min(before, engines))), until)
            self._over.clear()
            return self._asked

    def _check_layout(self, engines: int, before: int) -> None:
        """Raises LayoutError or GraphError if the run cannot have so many engines."""
        if engines < 1:
            raise LayoutError(f"{engines} engines were asked for; expected at least 1")
        if engines == before:
            raise LayoutError(f"it has {before} engines already")
        self._replays.scheduler.graphs_of(GENERATION, engines)
        if engines > before:
            check_machine(with_engines(self._config, engines))
            self._check_free((engines - before) * self._group.layout.shard_size)

    def _check_free(self, workers: int) -> None:
        """Raises LayoutError if Ray lacks free GPUs for so many more workers, or their hosts lack memory."""
        share = gpus_per_worker(self._config.cluster)
        free = ray.available_resources().get("GPU", 0.0) + self._group.reserved_gpus
        if share * workers > free:
            raise LayoutError(f"{workers} more workers need {share * workers:g} GPUs, but {free:g} are free")
        found = self._group.call_function(memory)
        free_on = {place.host: free for place, (_, free) in zip(self._group.locations, found, strict=True)}
        needed, available = workers * max(held for held, _ in found), sum(free_on.values())
        if needed > available:
            raise LayoutError(
                f"{workers} more workers need {needed >> 20} MiB of host memory, as much as those that run, but "
                f"{available >> 20} MiB are available"
            )

    def _check(self, asked: _Asked) -> None:
        """Raises if new engines are no longer wanted."""
        if self._ended:
            raise RunError("the run ends, or restarts")
        if asked.lost is not None:
            raise asked.lost
        if time.monotonic() > asked.until and not asked.begun:
            missed = "no refit came, at which engines join and leave" if asked.started else "the new ones have not started"
            raise DeadlineError(f"{missed}; nothing has changed")

    def _wait(self, asked: _Asked) -> None:
        """Waits until the loop has made the change; withdraws it at the deadline, or if the session ends, if it can."""
        while True:
            try:
                return asked.done.result(timeout=POLL_S)
            except TimeoutError:
                with self._lock:
                    try:
                        self._check(asked)
                    except RunError:
                        asked.started = False  # it will not begin
                        raise


def has_room(group: WorkerGroup, ranks: Collection[int], gpus: float) -> bool:
    """Whether workers with so many `gpus` can start again in the places of `ranks`: on living hosts, or free GPUs."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    gone = [rank for rank in ranks if group.locations[rank].node not in alive]
    free = float(ray.available_resources().get("GPU", 0.0))
    return gpus * len(gone) <= free


def memory(worker: object) -> tuple[int, int]:
    """Bytes of host memory that a worker's process holds, and that are available on its host. Runs in the worker."""
    return private_memory(), available_memory()
