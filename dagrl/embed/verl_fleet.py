"""One graph over the actors of a verl fleet, through which the methods of all worker groups on these actors run.

The graph has one node per actor: `execute_with_func_generator`, a method of every verl worker that calls any function with
the worker. The method to run is part of the input, so any number of methods and of colocated roles need one graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dagrl.embed.fleet import PER_WORKER, CallOrder
from dagrl.embed.verl_data import register_reducers
from dagrl.runtime.arguments import Arguments
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
        self._order = CallOrder(limits.deadline_s)
        warm = [NOTHING] * len(actors)
        self._scheduler.add(verl_call, codec=PER_WORKER, warmup_value=warm, input_bytes=limits.max_bytes)
        self._scheduler.compile()
        self._scheduler.warmup()

    def submit(self, arguments: Sequence[Arguments]) -> Replay:
        """Starts a call with the `Arguments` of each worker. Its replay gives the results of the workers in a list."""
        return self._order.replay(lambda: self._scheduler.replay(verl_call, list(arguments)))

    def outside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method of verl's own, after all replays; later replays wait until it has ended on the workers."""
        return self._order.plain(lambda: function(*args, **kwargs), _references)

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
    """What a non-blocking method of verl returns, one by one: object references, or anything else."""
    items = result if isinstance(result, list) else getattr(result, "futures", None) or [result]
    return list(items)
