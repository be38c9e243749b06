"""Attributes, such as functions of a library, that are others for a block."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def setting(owner: object, **values: object) -> Iterator[None]:
    """Gives `owner` these attributes for the block, and then those that it had."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
