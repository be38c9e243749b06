"""Checks a worker class against the protocols that it has to fit, before any actor of it is started."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator

from dagrl.errors import ConfigError
from dagrl.runtime.phase import without_self
from dagrl.runtime.worker import WorkerHooks

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_worker_class(
    worker_class: type, protocols: Iterable[type] = (), hooks: Iterable[type] = (), where: str = ""
) -> None:
    """Raise ConfigError, with a line for each mistake, unless `worker_class` fits.

    It must have every method of `protocols`, with a signature that accepts the protocol's arguments. Methods of `hooks`
    and of `WorkerHooks` are optional, but checked if they are there. `where` is the configuration's key, for the error.
    """
    found = inspect.signature(worker_class)
    expected = f"{worker_class.__name__}(context, config)"
    mistakes = [
        *([] if _accepts(found, 2) else [f"its constructor is {worker_class.__name__}{_plain(found)}; expected {expected}"]),
        *(line for protocol in protocols for line in _mistakes(worker_class, protocol, optional=False)),
        *(line for protocol in (WorkerHooks, *hooks) for line in _mistakes(worker_class, protocol, optional=True)),
    ]
    if mistakes:
        name = f"{worker_class.__module__}:{worker_class.__qualname__}"
        lines = "".join(f"\n  {line}" for line in dict.fromkeys(mistakes))
        raise ConfigError(f"{f'{where}: ' if where else ''}the worker class {name} does not fit; change it:{lines}")


def _mistakes(worker_class: type, protocol: type, *, optional: bool) -> Iterator[str]:
    for name, member in inspect.getmembers(protocol, inspect.isfunction):
        if name.startswith("_"):
            continue
        is_static = isinstance(inspect.getattr_static(protocol, name), staticmethod)
        expected = _signature(member, is_static)
        wanted = f"expected {'static ' if is_static else ''}{name}{_plain(expected)} ({protocol.__name__})"
        found = getattr(worker_class, name, None)
        if found is None:
            if not optional:
                yield f"it has no method {name}; {wanted}"
        elif not inspect.isroutine(found):
            yield f"{name} is of type {type(found).__name__}; {wanted}"
        elif inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found):
            yield f"{name} is an `async def`; {wanted}, a plain `def`"
        elif not _accepts_calls_of(signature := _signature(found, is_static), expected):
            yield f"{name} is {name}{_plain(signature)}; {wanted}"


def _signature(function: Callable[..., object], is_static: bool) -> inspect.Signature:
    """The signature of a class's function as the protocol calls it: on the class, or without `self` on an instance."""
    signature = inspect.signature(function)
    return signature if is_static else without_self(signature)


def _accepts_calls_of(found: inspect.Signature, expected: inspect.Signature) -> bool:
    """Whether `found` takes the positional arguments of `expected`, with and without those that have defaults."""
    parameters = [one for one in expected.parameters.values() if one.kind in _POSITIONAL]
    required = [one for one in parameters if one.default is inspect.Parameter.empty]
    return _accepts(found, len(required)) and _accepts(found, len(parameters))


def _accepts(signature: inspect.Signature, arguments: int) -> bool:
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def _plain(signature: inspect.Signature) -> str:
    """The signature without quotes around annotations that are strings, and without the mark of positional arguments."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(signature)).replace(", /", "")
