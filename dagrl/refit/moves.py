"""What one rank does in a refit: the moves of each message, and how a message is laid out. Plain data, picklable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dagrl.refit.quantize import in_blocks
from dagrl.refit.slices import Box, Scales, volume

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}
ALIGNMENT = 16  # bytes; views of every dtype into a message start at a multiple of it
_SCALE_BYTES = 4


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def message_bytes(box: Box, dtype: str, scaled: bool) -> int:
    """Bytes of a box on the wire; scales follow the box, aligned."""
    nbytes = volume(box) * ITEM_BYTES[dtype]
    return aligned(nbytes) + volume(in_blocks(box)) * _SCALE_BYTES if scaled else nbytes


@dataclass(frozen=True, slots=True)
class Move:
    """One box of a parameter on its way: from a box of a source tensor into a box of a destination tensor.

    `dtype` is that of the wire; a destination of another floating-point dtype casts what it receives. With `scales` the
    source quantizes what it sends, and scales travel behind it; with `source_scales` it has FP8 already, which it passes on.
    Where the name of a tensor is a stack, so is the tensor: its first dimension counts tensors.
    """

    name: str
    box: Box
    dtype: str
    source: str
    source_local: Box
    target: str
    target_local: Box
    scales: Scales | None = None
    source_scales: Scales | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return message_bytes(self.box, self.dtype, self.scales is not None)

    @property
    def extents(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def scale_offset(self) -> int:
        """Where scales begin, from the beginning of the move."""
        return aligned(volume(self.box) * ITEM_BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class TransferBucket:
    """Moves that go from `source` to `destination` as one message of `nbytes`, in round `round`.

    In a `relay` the source is itself a destination, which passes on what it got in an earlier round.
    """

    round: int
    source: int
    destination: int
    moves: tuple[Move, ...]
    nbytes: int
    relay: bool = False


def bucket_offsets(moves: Sequence[Move]) -> list[int]:
    """Byte offset of each move in its message."""
    offsets = [0]
    for move in moves[:-1]:
        offsets.append(offsets[-1] + aligned(move.nbytes))
    return offsets


@dataclass(frozen=True)
class RankPlan:
    """What one channel rank does in a refit, in order. `digest` is the whole plan's, equal on all ranks."""

    rank: int
    size: int
    digest: str
    sends: tuple[TransferBucket, ...]
    receives: tuple[TransferBucket, ...]
