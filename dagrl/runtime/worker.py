"""The contract of a worker class: its context, its methods, and the replay that is running.

A worker is any class whose constructor takes `(context, config)`. Phases name its methods; an `async def` runs on the
actor's event loop, and the node ends when it returns. `WorkerHooks` are the methods that the runtime itself calls. What
the training loops and refits call is typed in `dagrl.run.worker_protocols` and `dagrl.refit.connect`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dagrl.errors import ConfigError, RunError
from dagrl.runtime.layout import Coordinates, ParallelLayout
from dagrl.runtime.phase import without_self


class WorkerHooks(Protocol):
    """Methods that the runtime calls if a worker class has them. All are optional.

    A class may also have `requires`, a tuple of the top-level packages that it imports later. A run does not start unless
    they are installed.
    """

    @staticmethod
    def environment(config: Any, /) -> dict[str, str]:
        """Returns environment variables that the process needs before anything is imported."""

    @staticmethod
    def imports(config: Any, /) -> Callable[[], object]:
        """Returns what imports the libraries of a worker; it is pickled.

        A run on this machine calls it once, in a process with the `environment`, and forks the workers from there. It must
        start neither threads nor CUDA, and not import Ray: otherwise nothing is forked.
        """

    def prepare(self) -> None:
        """Called before `setup`, while other groups still start. Imports what `setup` needs, and takes no GPU memory."""

    def setup(self, address: str, /) -> None:
        """Called on all workers of the group at the same time, for a rendezvous at `address`, a free `host:port`.

        It is on the host of rank 0. If the class has `meets_by_shard = True`, each shard meets alone, on the host of its
        first rank, and is set up again alone after a failure.
        """

    def abort(self) -> None:
        """Breaks the worker's collectives, so that its peers raise. Called from another thread after a failure."""

    def reset(self) -> bool:
        """Called on a worker that lives after a failure. Makes it as new, for another `setup`.

        Returns False if its process cannot be set up again, which a restart then replaces; so it does without this method.
        """

    def shutdown(self) -> None:
        """Called once before the process ends."""


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
    """Returns whether this thread runs a warm-up replay. False outside a replay."""
    replay = _current.get()
    return replay is not None and replay.warmup


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_worker_class(
    worker_class: type, protocols: Iterable[type] = (), hooks: Iterable[type] = (), where: str = ""
) -> None:
    """Raise ConfigError, with a line for each mistake, unless `worker_class` fits.

    It must have every method of `protocols`, with a signature that accepts the protocol's arguments. Methods of `hooks`
    and of `WorkerHooks` are optional, but checked if they are there. `where` is the configuration's key, for the error.
    """
    constructor, name, mistakes = inspect.signature(worker_class), worker_class.__name__, list[str]()
    if not _accepts(constructor, 2):
        mistakes.append(f"its constructor is {name}{_plain(constructor)}; expected {name}(context, config)")
    mistakes += [line for protocol in protocols for line in _mistakes(worker_class, protocol, optional=False)]
    mistakes += [line for hook in (WorkerHooks, *hooks) for line in _mistakes(worker_class, hook, optional=True)]
    if mistakes:
        path = f"{worker_class.__module__}:{worker_class.__qualname__}"
        lines = "".join(f"\n  {line}" for line in dict.fromkeys(mistakes))
        raise ConfigError(f"{f'{where}: ' if where else ''}the worker class {path} does not fit; change it:{lines}")


def _mistakes(worker_class: type, protocol: type, *, optional: bool) -> Iterator[str]:
    for name, member in inspect.getmembers(protocol, inspect.isfunction):
        if name.startswith("_"):
            continue
        is_static = isinstance(inspect.getattr_static(protocol, name), staticmethod)
        expected = _signature(member, is_static)
        wanted = f"expected {'static ' if is_static else ''}{name}{_plain(expected)} ({protocol.__name__})"
        method = getattr(worker_class, name, None)
        if method is None:
            if not optional:
                yield f"it has no method {name}; {wanted}"
        elif not inspect.isroutine(method):
            yield f"{name} is of type {type(method).__name__}; {wanted}"
        elif inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            yield f"{name} is an `async def`; {wanted}, a plain `def`"
        elif not _accepts_calls_of(signature := _signature(method, is_static), expected):
            yield f"{name} is {name}{_plain(signature)}; {wanted}"


def _signature(function: Callable[..., object], is_static: bool) -> inspect.Signature:
    """Returns the signature of a function as the protocol calls it: on the class, or without `self` on an instance."""
    signature = inspect.signature(function)
    return signature if is_static else without_self(signature)


def _accepts_calls_of(signature: inspect.Signature, expected: inspect.Signature) -> bool:
    """Returns whether `signature` takes the positional arguments of `expected`, with and without those with defaults."""
    parameters = [parameter for parameter in expected.parameters.values() if parameter.kind in _POSITIONAL]
    required = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
    return _accepts(signature, len(required)) and _accepts(signature, len(parameters))


def _accepts(signature: inspect.Signature, arguments: int) -> bool:
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def _plain(signature: inspect.Signature) -> str:
    """Formats a signature without quotes around annotations and without the mark of positional arguments."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(signature)).replace(", /", "")
