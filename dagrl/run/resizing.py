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
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import ray
from ray.actor import ActorHandle

from dagrl.config import Config
from dagrl.config.settings import with_engines
from dagrl.errors import DagrlError, DeadlineError, LayoutError, RunError
from dagrl.machine import available_memory, private_memory
from dagrl.rl.rollout.engines import Change
from dagrl.run.cluster import gpus_per_worker
from dagrl.run.fleet import Fleet
from dagrl.run.preflight import check_machine
from dagrl.run.replays import Replays
from dagrl.runtime.deadline import in_background
from dagrl.runtime.worker_group import WorkerGroup, end_workers

logger = logging.getLogger(__name__)

ROLE = "generation"

POLL_S = 0.1
"""How often a request looks whether its session has ended."""


@dataclass
class _Asked:
    """A request: how many engines there were and shall be, and how far it is."""

    before: int
    engines: int
    until: float  # `time.monotonic`
    joining: WorkerGroup | None = None
    started_s: float = 0.0
    started: bool = False
    begun: bool = False
    leaving: list[ActorHandle] = field(default_factory=list)
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
            if asked.joining is not None and self._group.layout.dp == asked.before:
                self._group.end_shards(asked.joining, self._config.timeouts.teardown_s / 2)
            raise
        finally:
            self._asked = None
            self._over.set()
        started = f"; the new ones had started after {asked.started_s:.1f} s" if asked.started_s else ""
        return f"done after {time.monotonic() - begin:.1f} s: {engines} engines, before {asked.before}{started}"

    @property
    def ready(self) -> bool:
        """Whether engines can leave or join now."""
        return self._asked is not None and self._asked.started and not self._asked.begun

    @property
    def begun(self) -> bool:
        """Whether a change was taken and is not made yet."""
        return self._asked is not None and self._asked.begun and not self._asked.done.done()

    def take_change(self) -> Change | None:
        """Begins the change that is ready, if there is one. It can no longer be withdrawn."""
        with self._lock:
            asked = self._asked
            if asked is None or not self.ready:
                return None
            asked.begun = True
            return Change(tuple(range(min(asked.before, asked.engines))), asked.engines)

    def resize(self) -> None:
        """Makes the change that was taken. All workers rest."""
        asked = self._asked
        assert asked is not None and asked.begun
        kept = range(min(asked.before, asked.engines))
        asked.leaving = self._replays.scheduler.resize(ROLE, kept, asked.joining)
        self._replays.devices += (asked.engines - asked.before) * self._group.layout.shard_size
        self._fleet.engines = asked.engines

    def finish(self) -> None:
        """Ends the engines that have left, in the background, and the request. Does nothing without one."""
        asked = self._asked
        if asked is None or not asked.begun:
            return
        in_background(partial(self._end_leaving, asked), "end-engines")
        logger.info("%d generation engines, before %d", asked.engines, asked.before)
        self._fleet.settle()
        asked.done.set_result(None)

    def end(self) -> None:
        """Gives up a request at the end of a session, and ends the engines that it started or that leave."""
        with self._lock:
            self._ended, asked = True, self._asked
        if asked is not None and not asked.done.done():
            self._end_leaving(asked)
        self._over.wait(self._config.timeouts.teardown_s)

    def _end_leaving(self, asked: _Asked) -> None:
        end_workers([(self._group.role, asked.leaving)], self._config.timeouts.teardown_s / 2)

    def _accept(self, engines: int, until: float) -> _Asked:
        with self._lock:
            if self._ended:
                raise RunError("the run ends, or restarts")
            if self._asked is not None:
                raise LayoutError(f"it is being scaled to {self._asked.engines} engines; ask again when that is done")
            before = self._group.layout.dp
            self._check_layout(engines, before)
            self._asked = _Asked(before, engines, until)
            self._over.clear()
            return self._asked

    def _check_layout(self, engines: int, before: int) -> None:
        """Raises LayoutError or GraphError if the run cannot have so many engines."""
        if engines < 1:
            raise LayoutError(f"{engines} engines were asked for; expected at least 1")
        if engines == before:
            raise LayoutError(f"it has {before} engines already")
        self._replays.scheduler.graphs_of(ROLE, engines)
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
        if time.monotonic() > asked.until:
            raise DeadlineError("the new engines have not started in time")

    def _wait(self, asked: _Asked) -> None:
        """Waits until the loop has made the change; withdraws it at the deadline, or if the session ends, if it can."""
        while True:
            try:
                return asked.done.result(timeout=POLL_S)
            except TimeoutError:
                with self._lock:
                    self._give_up(asked)

    def _give_up(self, asked: _Asked) -> None:
        error: DagrlError | None = None
        if self._ended:
            error = RunError("the run ends, or restarts")
        elif time.monotonic() > asked.until and not asked.begun:
            error = DeadlineError("no refit came in time, at which engines join and leave; nothing has changed")
        if error is not None:
            asked.started = False  # if it has not begun, it will not
            raise error


def memory(worker: object) -> tuple[int, int]:
    """Bytes of host memory that a worker's process holds, and that are available on its host. Runs in the worker."""
    return private_memory(), available_memory()
