"""Pickles values with their large buffers apart.

The driver pickles an input of any type once (`Encoded`), and each worker unpickles it where it uses it. So its size is known
before it is sent, and a worker of a fused graph unpickles only its own shard's part (`Shares`).
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dagrl.errors import RunError, error_text
from dagrl.runtime.edges.tensors import edge_reducers, make_torch_picklable

Bytes = bytes | memoryview


class UnreadableError(RunError):
    """A whole message arrived, but this process cannot unpickle it."""


def dump(value: object, in_band: bool = False, plain: bool = False) -> list[Bytes]:
    """Returns a value as a pickle and its buffers, or everything `in_band`.

    Buffers are those of arrays and of tensors on the CPU. `plain`: the value holds no tensors and no objects, which saves a
    microsecond. What plain pickle cannot send (functions, classes of a script) is sent by value.
    """
    make_torch_picklable()  # a relay writes values that it has not sized
    buffers: list[pickle.PickleBuffer] = []
    apart = None if in_band else buffers.append
    try:
        if plain:
            pickled = pickle.dumps(value, protocol=5, buffer_callback=apart)
        else:
            pickled = _dumps(pickle.Pickler, value, copyreg.dispatch_table, apart)
        by_reference = b"__main__" not in pickled
    except (pickle.PicklingError, AttributeError, TypeError):
        by_reference = False
    if not by_reference:
        from ray.cloudpickle import CloudPickler

        buffers.clear()
        pickled = _dumps(CloudPickler, value, CloudPickler.dispatch_table, apart)
    return [pickled, *[buffer.raw() for buffer in buffers]]


def _dumps(pickler_class: Any, value: object, table: Mapping[type, Any], apart: Callable[..., Any] | None) -> bytes:
    file = io.BytesIO()
    pickler = pickler_class(file, protocol=5, buffer_callback=apart)
    pickler.dispatch_table = {**table, **edge_reducers()}
    pickler.dump(value)
    return file.getvalue()


def load(pickled: Bytes, buffers: Sequence[Bytes | bytearray] = ()) -> Any:
    """Returns the value that `dump` was given. Raises UnreadableError if this process cannot make it."""
    try:
        return pickle.loads(pickled, buffers=buffers)  # noqa: S301  # written by a process of the same run
    except Exception as error:  # raised by the value's own classes
        raise UnreadableError(
            f"{error_text(error)}, when a value was unpickled; send only values that every process of the phase can import "
            "and unpickle"
        ) from error


@dataclass(eq=False, slots=True)
class Encoded:
    """A pickled value with its large buffers apart, which are sent without being copied into the pickle."""

    pickled: Bytes
    buffers: Sequence[Bytes | bytearray]

    @staticmethod
    def of(value: object) -> Encoded:
        """Pickles a value. Raises RunError if it cannot be pickled."""
        try:
            pickled, *buffers = dump(value)
        except RunError:
            raise
        except Exception as error:  # raised by the value's own classes
            raise RunError(
                f"a {type(value).__name__} cannot be pickled ({error_text(error)}); send plain data, arrays or tensors"
            ) from error
        return Encoded(pickled, buffers)

    @property
    def payload_bytes(self) -> int:
        """An upper bound for its bytes in a channel."""
        return 256 + len(self.pickled) + sum([256 + len(buffer) for buffer in self.buffers])

    def load(self) -> Any:
        """Returns the value. Raises UnreadableError if this process cannot make it."""
        return load(self.pickled, self.buffers)

    def __reduce__(self) -> tuple[Any, ...]:
        return Encoded, (self.pickled, [pickle.PickleBuffer(buffer) for buffer in self.buffers])


@dataclass(frozen=True, slots=True)
class Shares:
    """The parts of an input for the shards of one graph, in their order. Equal parts may be one object, sent once."""

    parts: tuple[Encoded, ...]

    @property
    def payload_bytes(self) -> int:
        """An upper bound for its bytes in a channel."""
        return 256 + sum(part.payload_bytes for part in {id(part): part for part in self.parts}.values())
