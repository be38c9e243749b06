"""Keyword arguments of a user's function, by the names of its parameters.

The first three parameters are the texts. Every further one is filled by its name; `**columns` gets everything there is.
"""

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

from dagrl.rl.functions.answers import is_coroutine

TEXTS = 3  # positional arguments: the prompt, the completion and the reference


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # some C functions have none
        return inspect.signature(lambda *texts: None)


def takes_texts(function: Callable[..., Any]) -> bool:
    """Whether the function takes the texts by position."""
    try:
        _signature(function).bind_partial(*[None] * TEXTS)
    except TypeError:
        return False
    return True


def keywords_of(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Returns the names of the parameters after the texts, and whether each must be given; and whether it takes any name."""
    parameters = list(_signature(function).parameters.values())
    named = [item for item in parameters[TEXTS:] if item.kind is Parameter.POSITIONAL_OR_KEYWORD]
    named += [item for item in parameters if item.kind is Parameter.KEYWORD_ONLY]
    takes_any = any(item.kind is Parameter.VAR_KEYWORD for item in parameters)
    return {item.name: item.default is Parameter.empty for item in named}, takes_any


def with_keywords(function: Callable[..., Any], *, batched: bool) -> Callable[..., Any]:
    """Returns a function of the texts and a dictionary (batched: a list of them), whose values `function` gets by name."""
    texts = list(_signature(function).parameters)[:TEXTS]

    def call(*arguments: Any) -> Any:
        values = arguments[-1]
        if batched:
            values = {name: [row[name] for row in values] for name in (values[0] if values else ())}
        return function(*arguments[:-1], **{name: value for name, value in values.items() if name not in texts})

    async def wait(*arguments: Any) -> Any:
        return await call(*arguments)

    return wait if is_coroutine(function) and not batched else call
