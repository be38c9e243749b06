"""Keyword arguments of a user's function, by the names of its parameters.

The first three parameters are the texts. Every further one is filled by its name; `**columns` gets everything there is.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

from dagrl.rl.functions.answers import is_coroutine

TEXTS = 3  # positional arguments: the prompt, the completion and the reference


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # some C functions have no signature
        return []


def takes_texts(function: Callable[..., Any]) -> bool:
    """Whether the function takes the texts by position."""
    try:
        inspect.signature(function).bind_partial(*[None] * TEXTS)
    except TypeError:
        return False
    except ValueError:  # some C functions have no signature
        return True
    return True


def keywords_of(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Returns the names of the parameters after the texts, and whether each must be given; and whether it takes any name."""
    parameters = _parameters(function)
    named = [item for item in parameters[TEXTS:] if item.kind is Parameter.POSITIONAL_OR_KEYWORD]
    named += [item for item in parameters if item.kind is Parameter.KEYWORD_ONLY]
    takes_any = any(item.kind is Parameter.VAR_KEYWORD for item in parameters)
    return {item.name: item.default is Parameter.empty for item in named}, takes_any


def with_keywords(function: Callable[..., Any], *, batched: bool) -> Callable[..., Any]:
    """Returns a function of the texts and a dictionary (batched: a list of them), whose values `function` gets by name."""

    texts = {item.name for item in _parameters(function)[:TEXTS]}

    def named(values: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        if isinstance(values, Mapping):
            return values
        return {name: [row[name] for row in values] for name in (values[0] if values else ())}

    def call(*arguments: Any) -> Any:
        more = {name: value for name, value in named(arguments[-1]).items() if name not in texts}
        return function(*arguments[:-1], **more)

    async def wait(*arguments: Any) -> Any:
        return await call(*arguments)

    return wait if is_coroutine(function) and not batched else call
