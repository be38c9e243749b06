"""What one rank does in a refit: the moves of each message, and how a message is laid out. Plain data, picklable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from dagrl.refit.quantize import in_blocks
from dagrl.refit.slices import Box, Scales, volume

Side = Literal["source", "target"]

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
DIRECT_BYTES = 16 << 20
"""What lies in one piece and has at least so many bytes is a message of its own, straight from and into tensors.

Between two ranks, that is: staging costs a copy on each side and memory, and small messages more of the link's time.
"""
_SCALE_BYTES = 4


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def move_bytes(box: Box, dtype: str, scaled: bool) -> int:
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

    def half(self, side: Side) -> tuple[str, Box]:
        """The tensor of one side, and the box in it."""
        return (self.source, self.source_local) if side == "source" else (self.target, self.target_local)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return move_bytes(self.box, self.dtype, self.scales is not None)

    @property
    def extents(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def scale_offset(self) -> int:
        """Where scales begin, from the beginning of the move."""
        return aligned(volume(self.box) * ITEM_BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class Message:
    """Moves that travel as one, in order, each at a multiple of `ALIGNMENT`."""

    moves: tuple[Move, ...]

    @property
    def offsets(self) -> list[int]:
        """Byte offset of each move."""
        return list(accumulate((aligned(move.nbytes) for move in self.moves[:-1]), initial=0))

    @property
    def nbytes(self) -> int:
        """All moves and the gaps between them."""
        return self.offsets[-1] + self.moves[-1].nbytes


@dataclass(frozen=True, slots=True)
class TransferBucket:
    """Messages that go from `source` to `destination` as one group, in round `round`.

    In a `relay` the source is itself a destination, which passes on what it got in an earlier round.
    """

    round: int
    source: int
    destination: int
    messages: tuple[Message, ...]
    relay: bool = False

    @property
    def moves(self) -> tuple[Move, ...]:
        """Those of all messages, in order."""
        return tuple(move for message in self.messages for move in message.moves)

    @property
    def nbytes(self) -> int:
        """Of all moves, without the gaps between them."""
        return sum(move.nbytes for move in self.moves)


def cut_messages(moves: Sequence[Move], least: int) -> tuple[tuple[Message, ...], tuple[Move, ...]]:
    """Each run of `least` bytes or more as a message, and all other moves.

    A run is one move, or several that lie one behind the other in both tensors. Both ends cut alike, by the moves alone:
    where a tensor turns out not to have a run in one piece, that end stages the message, and the other still need not.
    """
    runs: list[list[Move]] = []
    for move in moves:
        if runs and adjoin(runs[-1][-1], move):
            runs[-1].append(move)
        else:
            runs.append([move])
    large: list[Message] = []
    small: list[Move] = []
    for run in runs:
        if run[0].scales is None and sum(move.nbytes for move in run) >= least:
            large.append(Message(tuple(run)))
        else:
            small += run
    return tuple(large), tuple(small)


def adjoin(first: Move, second: Move) -> bool:
    """Whether `second` begins where `first` ends, in the source's tensor and in the destination's, and so in a message."""
    return (
        (first.source, first.target, first.dtype) == (second.source, second.target, second.dtype)
        and first.scales is None
        and second.scales is None
        and first.nbytes % ALIGNMENT == 0
        and boxes_adjoin(first.source_local, second.source_local)
        and boxes_adjoin(first.target_local, second.target_local)
    )


def boxes_adjoin(first: Box, second: Box) -> bool:
    """Whether `second` goes on where `first` stops, in the outermost dimension that has more than one element of both."""
    dim = next((dim for dim, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), None)
    if dim is None or first[dim][1] != second[dim][0] or first[dim + 1 :] != second[dim + 1 :]:
        return False
    return all(stop - start == 1 for start, stop in first[:dim])


def place_of_run(moves: Sequence[Move], side: Side) -> tuple[str, Box] | None:
    """The tensor of `side`, and the box of it that is all of a run; None for moves that are none, or go in FP8."""
    if moves[0].scales is not None or not all(adjoin(*pair) for pair in pairwise(moves)):
        return None
    name, first = moves[0].half(side)
    _, last = moves[-1].half(side)
    whole = tuple((start, stop) for (start, _), (_, stop) in zip(first, last, strict=True))
    return (name, whole) if volume(whole) == sum(volume(move.box) for move in moves) else None


@dataclass(frozen=True)
class RankPlan:
    """What one channel rank does in a refit, in order. `digest` is the whole plan's, equal on all ranks."""

    rank: int
    size: int
    digest: str
    sends: tuple[TransferBucket, ...]
    receives: tuple[TransferBucket, ...]
