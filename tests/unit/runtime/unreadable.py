"""A value that pickles, and cannot be unpickled."""

from __future__ import annotations

from typing import Any


class Unreadable:
    def __reduce__(self) -> Any:
        return _fail, ({"of": [Unreadable]},)


def unreadable() -> object:
    """Beside values of all kinds that containers can hold it in."""
    one = Unreadable()
    return [one, {"a": one, one: 1}, {one}, (one, 2.0)]


def _fail(*arguments: object) -> None:
    raise ValueError("cannot be made again")
