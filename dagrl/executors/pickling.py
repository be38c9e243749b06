"""Values as bytes: a pickle with its large buffers beside it, and what is left of one that cannot be read again."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from dagrl.errors import RunError, WorkerFailure, error_text
from dagrl.executors.tensors import make_torch_picklable

Bytes = bytes | memoryview


class UnreadableError(RunError):
    """A message came whole, but what is in it cannot be unpickled by this process.

    `content` is the message with a stand-in for everything that is no plain data; `writer` the id of the actor and the label
    of the node that it comes from, once they are known.
    """

    def __init__(self, error: Exception, content: Any) -> None:
        self.content = content
        self.writer = ("", "")
        super().__init__(
            f"{error_text(error)}, when a value was unpickled; send what every process of the phase can import and make "
            "again of its pickle"
        )


def dump(value: object, in_band: bool = False) -> list[Bytes]:
    """A value as a pickle and its buffers, or all `in_band`.

    What plain pickle cannot send (functions, classes of a script) goes by value.
    """
    make_torch_picklable()  # a relay writes what it has not sized
    buffers: list[pickle.PickleBuffer] = []
    apart = None if in_band else buffers.append
    try:
        pickled = pickle.dumps(value, protocol=5, buffer_callback=apart)
        by_reference = b"__main__" not in pickled
    except (pickle.PicklingError, AttributeError, TypeError):
        by_reference = False
    if not by_reference:
        from ray import cloudpickle

        buffers.clear()
        pickled = cloudpickle.dumps(value, protocol=5, buffer_callback=apart)
    return [pickled, *[buffer.raw() for buffer in buffers]]


def load(pickled: Bytes, buffers: Sequence[Bytes | bytearray] = ()) -> Any:
    """The value that `dump` was given. Raises UnreadableError for one that this process cannot make."""
    try:
        return pickle.loads(pickled, buffers=buffers)  # noqa: S301  # written by a process of the same run
    except Exception as error:  # of the value's own classes
        try:
            content = _PlainUnpickler(pickled, buffers).load()
        except Exception:  # no value's fault
            raise error from None
        raise UnreadableError(error, content) from error


class _StandIn:
    """Takes the place of any class, function and object of a pickle."""

    def __new__(cls, *args: object, **kwargs: object) -> _StandIn:
        return super().__new__(cls)

    def _ignore(self, *args: object, **kwargs: object) -> _StandIn:
        return self

    __call__ = __setstate__ = __setitem__ = append = extend = add = _ignore


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain data, and failures of workers."""

    def __init__(self, pickled: Bytes, buffers: Sequence[Bytes | bytearray]) -> None:
        import io

        super().__init__(io.BytesIO(pickled), buffers=buffers)

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        known = (module, name) == (WorkerFailure.__module__, WorkerFailure.__name__)
        return WorkerFailure if known else _StandIn
