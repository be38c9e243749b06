"""What methods are given besides the values of a phase: constants that are objects, and all arguments of one call."""

from __future__ import annotations

import functools
import hashlib
import pickle
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dagrl.errors import GraphError, error_text
from dagrl.runtime.edges.pickling import dump


class Static:
    """A constant that is an object, such as a loss function: `train.map("train", data=batch, loss_fn=Static(loss_fn))`.

    It is pickled here, once, when the phase is traced. Each worker unpickles it once and passes the same object to every
    call, so methods must not change it. Raises GraphError if it cannot be pickled.
    """

    def __init__(self, value: object) -> None:
        self.kind = type(value).__name__
        try:
            self.pickled = bytes(dump(value, in_band=True)[0])
        except Exception as error:  # raised by the value's own classes
            raise GraphError(
                f"Static({reprlib.repr(value)}) cannot be pickled ({error_text(error)}); give an object that every worker "
                "can unpickle, or make it in the worker"
            ) from error

    @property
    def value(self) -> Any:
        """The object, as this process unpickled it."""
        return _unpickled(self.pickled)

    def digest(self) -> str:
        return hashlib.sha256(self.pickled).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.pickled == other.pickled

    def __hash__(self) -> int:
        return hash(self.pickled)

    def __repr__(self) -> str:
        return f"Static({self.kind})"


@functools.lru_cache(maxsize=64)
def _unpickled(pickled: bytes) -> Any:
    return pickle.loads(pickled)  # noqa: S301  # written by the driver of the same run


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one call, which `Shard.spread` passes to a method: `method(*args, **kwargs)`."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
