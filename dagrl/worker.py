"""What a worker class is given, and what it may ask while one of its methods runs in a replay.

A worker is any class whose constructor takes `(context, config)`. Its methods are what phases name, those that are no
`async def`: a node is over when its method returns. These have a meaning of their own; all are optional:

- `check(config, hf_config)` (static): raises a UserError, before any actor starts, for a model that the class cannot hold;
- `describe(config, hf_config, layout, rank) -> list[WeightSlice]` (static): the weights that a rank will hold, for a refit
  plan without a run;
- `weight_config() -> Mapping`: the keys of the model's configuration that decide what it computes; train and generation
  workers that differ in one are refused before a refit;
- `environment(config) -> dict[str, str]` (static): environment variables the process needs before anything is imported;
- `setup(address)`: called once on all workers of a group at the same time; `address` is `host:port` of rank 0, free to
  use for a rendezvous;
- `abort()`: called, from another thread, when this worker failed or a peer did: break collectives so that peers are freed;
- `shutdown()`: called once, before the process ends.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from dagrl.errors import RunError
from dagrl.layout import Coordinates, ParallelLayout


@dataclass(frozen=True)
class WorkerContext:
    """Who a worker is: its role, its rank in the layout of its group, and the deadline of a collective in seconds."""

    role: str
    rank: int
    layout: ParallelLayout
    seed: int = 0
    collective_timeout_s: float = 60.0

    @property
    def coordinates(self) -> Coordinates:
        """Where the worker stands in its group's layout."""
        return self.layout.coordinates(self.rank)


class ReplayContext(NamedTuple):
    """The replay that is running: `warmup` replays must leave weights, optimizer, RNG and counters as they were."""

    phase: str
    replay: int
    warmup: bool


_current: ContextVar[ReplayContext | None] = ContextVar("dagrl_replay", default=None)


class replay_context:  # a class, not a generator: it is on the way of every replay, and this takes half the time
    """Make `replay` the current one for the methods called inside the block."""

    def __init__(self, replay: ReplayContext) -> None:
        self._replay = replay

    def __enter__(self) -> None:
        self._token = _current.set(self._replay)

    def __exit__(self, *exception: object) -> None:
        _current.reset(self._token)


def current_replay() -> ReplayContext:
    """The replay this thread is running; raises RunError outside of one."""
    replay = _current.get()
    if replay is None:
        raise RunError("no replay is running in this thread; current_replay() is for methods called by a phase")
    return replay


def in_warmup() -> bool:
    """Whether this thread runs a warm-up replay (False outside of a replay)."""
    replay = _current.get()
    return replay is not None and replay.warmup
