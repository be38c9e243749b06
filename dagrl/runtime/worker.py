"""What a worker class is given, what it may define, and what its methods may ask while a replay runs.

A worker is any class whose constructor takes `(context, config)`. Phases name its methods; an `async def` runs on the
actor's event loop, and the node ends when it returns. `WorkerHooks` are the methods that the runtime itself calls. What
the training loops and refits call is typed in `dagrl.run.worker_protocols` and `dagrl.refit.connect`.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dagrl.errors import RunError
from dagrl.runtime.layout import Coordinates, ParallelLayout


class WorkerHooks(Protocol):
    """Methods that the runtime calls if a worker class has them. All are optional.

    A class may also have `requires`, a tuple of the top-level packages that it imports later. A run does not start unless
    they are installed.
    """

    @staticmethod
    def environment(config: Any, /) -> dict[str, str]:
        """Returns environment variables that the process needs before anything is imported."""
        ...

    def prepare(self) -> None:
        """Called before `setup`, while other groups still start. Imports what `setup` needs, and takes no GPU memory."""
        ...

    def setup(self, address: str, /) -> None:
        """Called on all workers of the group at the same time, for a rendezvous at `address`, a free `host:port`.

        It is on the host of rank 0. If the class has `meets_by_shard = True`, each shard meets alone, on the host of its
        first rank, and is set up again alone after a failure.
        """
        ...

    def abort(self) -> None:
        """Breaks the worker's collectives, so that its peers raise. Called from another thread after a failure."""
        ...

    def reset(self) -> bool:
        """Called on a worker that lives after a failure. Makes it as new, for another `setup`.

        Returns False if its process cannot be set up again, which a restart then replaces; so it does without this method.
        """
        ...

    def shutdown(self) -> None:
        """Called once before the process ends."""
        ...


@dataclass(frozen=True)
class WorkerContext:
    """A worker's role, its rank in the layout of its group, and the deadline of a collective in seconds."""

    role: str
    rank: int
    layout: ParallelLayout
    seed: int = 0
    collective_timeout_s: float = 60.0

    @property
    def coordinates(self) -> Coordinates:
        """The worker's coordinates in the layout of its group."""
        return self.layout.coordinates(self.rank)


class ReplayContext(NamedTuple):
    """The replay that is running. A warm-up must leave weights, optimizer, RNG and counters unchanged."""

    phase: str
    replay: int
    warmup: bool


_current: ContextVar[ReplayContext | None] = ContextVar("dagrl_replay", default=None)


class replay_context:  # a class takes half the time of a generator, and every replay enters one
    """Makes `replay` the current replay of this thread inside the block."""

    def __init__(self, replay: ReplayContext) -> None:
        self._replay = replay

    def __enter__(self) -> None:
        self._token = _current.set(self._replay)

    def __exit__(self, *exception: object) -> None:
        _current.reset(self._token)


def current_replay() -> ReplayContext:
    """Returns the replay that this thread runs. Raises RunError outside a replay."""
    replay = _current.get()
    if replay is None:
        raise RunError("no replay is running in this thread; current_replay() is for methods called by a phase")
    return replay


def in_warmup() -> bool:
    """Whether this thread runs a warm-up replay. False outside a replay."""
    replay = _current.get()
    return replay is not None and replay.warmup
