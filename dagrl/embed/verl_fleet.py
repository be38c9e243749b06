"""One graph over the actors of a verl fleet, through which the methods of all worker groups on these actors run.

The graph has one node per actor: `execute_with_func_generator`, a method of every verl worker that calls any function with
the worker. The method to run is part of the input, so any number of methods and of colocated roles need one graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from dagrl.embed.fleet import Fleet, FleetLimits
from dagrl.embed.verl_data import register_reducers

RUN = "execute_with_func_generator"

_fleets: weakref.WeakValueDictionary[tuple[str, ...], Fleet] = weakref.WeakValueDictionary()
"""By the ids of their actors."""


def run_method(worker: object, name: str, *args: object, **kwargs: object) -> object:
    """Runs a method of the worker. On the worker."""
    return getattr(worker, name)(*args, **kwargs)


def fleet_of(actors: Sequence[Any], limits: FleetLimits) -> Fleet:
    """Returns the fleet on these actors, with the phase `RUN`: that of another worker group on them, or a new one."""
    key = tuple(actor._actor_id.hex() for actor in actors)
    fleet = _fleets.get(key)
    if fleet is not None and fleet.limits != limits:
        fleet.close()
    if fleet is None or fleet.closed:
        register_reducers()
        fleet = _fleets[key] = Fleet(actors, [RUN], role="verl", limits=limits, prepare=register_reducers)
    return fleet


def references(result: Any) -> list[Any]:
    """What a non-blocking method of verl returns, one by one: object references, or anything else."""
    items = result if isinstance(result, list) else getattr(result, "futures", None) or [result]
    return list(items)
