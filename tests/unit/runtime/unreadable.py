"""A value that pickles, and cannot be unpickled."""

from typing import Any


class Unreadable:
    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise ValueError("cannot be made again")
