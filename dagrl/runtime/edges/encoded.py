"""Values of any type that the driver pickles once, and that each worker unpickles where it uses them.

So the size of an input is known before it is sent, and a worker of a fused graph unpickles only its own shard's part.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dagrl.errors import RunError, error_text
from dagrl.runtime.edges.pickling import Bytes, dump, load


class Encoded:
    """A pickled value with its large buffers apart, which are sent without being copied into the pickle."""

    __slots__ = ("buffers", "pickled")

    def __init__(self, pickled: Bytes, buffers: Sequence[Bytes | bytearray]) -> None:
        self.pickled = pickled
        self.buffers = buffers

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
