"""One graph over the actors of a verl fleet, through which the methods of all worker groups on these actors run.

The graph has one node per actor: `execute_with_func_generator`, a method of every verl worker that calls any function with
the worker. The method to run is part of the input, so any number of methods and of colocated roles need one graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from dagrl.embed.verl_data import register_reducers
from dagrl.errors import PhaseError
from dagrl.runtime.arguments import Arguments
from dagrl.runtime.codec import Codec
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Shard, Value, phase
from dagrl.runtime.replay import Replay
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.runtime.worker_group import WorkerGroup

RUN = "execute_with_func_generator"


def run_method(worker: object, name: str, *args: object, **kwargs: object) -> object:
    """Runs a method of the worker. On the worker."""
    return getattr(worker, name)(*args, **kwargs)


def run_nothing(worker: object) -> None:
    """What workers do that a call leaves out. On the worker."""


NOTHING = Arguments((run_nothing,))


@phase
def verl_call(verl: Shard, arguments: Any) -> Value:
    """Every worker runs what its own `Arguments` say."""
    return verl.spread(RUN, arguments)


def _as_given(parts: Sequence[Arguments], workers: int) -> Sequence[Arguments]:
    return parts


@dataclass(frozen=True)
class FleetLimits:
    """`deadline_s`: the longest that one call may take. `max_bytes`: the most that one worker takes or returns in a call."""

    deadline_s: float
    max_bytes: int


class VerlFleet:
    """The graph over a fleet's actors, and the order of its replays with calls that verl sends itself."""

    def __init__(self, actors: Sequence[Any], limits: FleetLimits) -> None:
        register_reducers()
        group = WorkerGroup.from_actors(actors, ParallelLayout(dp=len(actors)), "verl")
        group.call_function(register_reducers)
        options = SchedulerOptions(
            fallback="error", fuse_shards=True, result_bytes=limits.max_bytes, replay_s=limits.deadline_s
        )
        self.limits = limits
        self._scheduler = Scheduler([group], options)
        self._lock = threading.RLock()
        self._replays: list[Replay] = []  # that may not have ended
        self._references: list[ray.ObjectRef[Any]] = []  # results of verl's own calls that may not have ended
        codec = Codec(_as_given, list)
        warm = [NOTHING] * len(actors)
        self._scheduler.add(verl_call, codec=codec, warmup_value=warm, input_bytes=limits.max_bytes)
        self._scheduler.compile()
        self._scheduler.warmup()

    def submit(self, arguments: Sequence[Arguments]) -> Replay:
        """Starts a call with the `Arguments` of each worker. Its replay gives the results of the workers in a list."""
        with self._lock:
            if self._references:
                ray.wait(self._references, num_returns=len(self._references), fetch_local=False)
                self._references = []
            self._replays = [replay for replay in self._replays if not replay.done]
            replay = self._scheduler.replay(verl_call, list(arguments))
            self._replays.append(replay)
        return replay

    def outside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method of verl's own, after all replays; later replays wait until it has ended on the workers."""
        with self._lock:
            for replay in self._replays:
                with suppress(PhaseError):  # it is raised to whoever asks for the result of that call
                    replay.result()
            self._replays = []
            result = function(*args, **kwargs)
            self._references += _references(result)
        return result

    def close(self) -> None:
        """Ends the graph. The actors live on."""
        _fleets.pop(_key(self._scheduler.groups["verl"].actors), None)
        self._scheduler.close()


_fleets: weakref.WeakValueDictionary[tuple[str, ...], VerlFleet] = weakref.WeakValueDictionary()


def fleet_of(actors: Sequence[Any], limits: FleetLimits) -> VerlFleet:
    """Returns the fleet on these actors: that of another worker group on them, or a new one."""
    fleet = _fleets.get(_key(actors))
    if fleet is None or fleet.limits != limits:
        if fleet is not None:
            fleet.close()
        fleet = _fleets[_key(actors)] = VerlFleet(actors, limits)
    return fleet


def _key(actors: Sequence[Any]) -> tuple[str, ...]:
    return tuple(actor._actor_id.hex() for actor in actors)


def _references(result: Any) -> list[Any]:
    """The object references in what a non-blocking method of verl returns."""
    items = result if isinstance(result, list) else getattr(result, "futures", None) or [result]
    return [item for item in items if isinstance(item, ray.ObjectRef)]
