"""Plain, picklable data of a refit: moves, messages and their layout, buckets, the plan of one rank, and reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, get_args

from dagrl.errors import RefitPlanError, RunError
from dagrl.refit.fp8 import in_blocks
from dagrl.refit.slices import Box, Scales, volume

MoveSide = Literal["source", "target"]

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
ALIGNMENT = 16  # bytes; every move starts at a multiple of it in its message, so that views of all dtypes are aligned
DIRECT_BYTES = 16 << 20
"""Contiguous runs of at least this many bytes are sent directly between tensors, as messages of their own.

This holds between two ranks. Staging costs memory and a copy on each side; small messages waste time on the link.
"""
_SCALE_BYTES = 4


def aligned(nbytes: int) -> int:
    """Returns the next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def move_bytes(box: Box, dtype: str, scaled: bool) -> int:
    """Returns the bytes of a box on the wire. Scales follow the box, aligned."""
    nbytes = volume(box) * ITEM_BYTES[dtype]
    return aligned(nbytes) + volume(in_blocks(box)) * _SCALE_BYTES if scaled else nbytes


@dataclass(frozen=True, slots=True)
class Move:
    """One box of a parameter, copied from a box of a source tensor into a box of a destination tensor.

    `dtype` is the dtype on the wire; a destination with another floating-point dtype casts. With `scales` the source
    quantizes the box and appends its scales; with `source_scales` it relays FP8. If a tensor's
    name is a stack, its first dimension counts tensors.
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

    def half(self, side: MoveSide) -> tuple[str, Box]:
        """Returns the tensor of one side and the box in it."""
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
        """Offset of the scales from the start of the move, in bytes."""
        return aligned(volume(self.box) * ITEM_BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class TransferMessage:
    """Moves that are sent as one message, in order, each at a multiple of `ALIGNMENT`."""

    moves: tuple[Move, ...]

    @property
    def offsets(self) -> list[int]:
        """Byte offset of each move."""
        return list(accumulate((aligned(move.nbytes) for move in self.moves[:-1]), initial=0))

    @property
    def nbytes(self) -> int:
        """Bytes of all moves, with the gaps between them."""
        return self.offsets[-1] + self.moves[-1].nbytes


@dataclass(frozen=True, slots=True)
class TransferBucket:
    """Messages that are sent from `source` to `destination` as one group, in round `round`.

    In a `relay` the source is itself a destination, which passes on what it received in an earlier round. If `mapped`, the
    two share a GPU, and the destination can read the source's tensors (`carry/mapped.py`).
    """

    round: int
    source: int
    destination: int
    messages: tuple[TransferMessage, ...]
    relay: bool = False
    mapped: bool = False

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves of all messages, in order."""
        return tuple(move for message in self.messages for move in message.moves)

    @property
    def nbytes(self) -> int:
        """Bytes of all moves, without the gaps between them."""
        return sum(move.nbytes for move in self.moves)


def split_messages(moves: Sequence[Move], least: int) -> tuple[tuple[TransferMessage, ...], tuple[Move, ...]]:
    """Returns each run of at least `least` bytes as a message, and all other moves.

    A run is one move, or several that are adjacent in both tensors. Both ends split alike, from the moves alone. If a run
    is not contiguous in the tensor of one end, that end stages the message; the other still need not.
    """
    runs: list[list[Move]] = []
    for move in moves:
        if runs and adjoin(runs[-1][-1], move):
            runs[-1].append(move)
        else:
            runs.append([move])
    large: list[TransferMessage] = []
    small: list[Move] = []
    for run in runs:
        if run[0].scales is None and sum(move.nbytes for move in run) >= least:
            large.append(TransferMessage(tuple(run)))
        else:
            small += run
    return tuple(large), tuple(small)


def adjoin(first: Move, second: Move) -> bool:
    """Returns whether `second` starts where `first` ends, in both tensors and so in a message."""
    return (
        (first.source, first.target, first.dtype) == (second.source, second.target, second.dtype)
        and first.scales is None
        and second.scales is None
        and first.nbytes % ALIGNMENT == 0
        and boxes_adjoin(first.source_local, second.source_local)
        and boxes_adjoin(first.target_local, second.target_local)
    )


def boxes_adjoin(first: Box, second: Box) -> bool:
    """Returns whether `second` continues `first` in the outermost dimension in which they differ."""
    dim = next((dim for dim, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), None)
    if dim is None or first[dim][1] != second[dim][0] or first[dim + 1 :] != second[dim + 1 :]:
        return False
    return all(stop - start == 1 for start, stop in first[:dim])


def box_of_run(moves: Sequence[Move], side: MoveSide) -> tuple[str, Box] | None:
    """Returns the tensor of `side` and the box that a run fills in it; None if the moves are no run, or are FP8."""
    if moves[0].scales is not None or not all(adjoin(*pair) for pair in pairwise(moves)):
        return None
    name, first = moves[0].half(side)
    _, last = moves[-1].half(side)
    whole = tuple((start, stop) for (start, _), (_, stop) in zip(first, last, strict=True))
    return (name, whole) if volume(whole) == sum(volume(move.box) for move in moves) else None


Verify = Literal["off", "checksum"]  # how a refit proves that receivers hold what was sent; see `carry/verify.py`


@dataclass(frozen=True)
class RankPlan:
    """What one channel rank sends and receives in a refit, in order, and how it is verified.

    `digest` identifies the whole plan and is equal on all ranks; `verify` must be too. Raises RefitPlanError for
    an unknown `verify`.
    """

    rank: int
    size: int
    digest: str
    sends: tuple[TransferBucket, ...]
    receives: tuple[TransferBucket, ...]
    verify: Verify = "off"

    def __post_init__(self) -> None:
        if self.verify not in get_args(Verify):
            raise RefitPlanError(f"refit.verify is {self.verify!r}; choose one of {', '.join(get_args(Verify))}")


@dataclass(frozen=True)
class RefitReport:
    """The bytes that one rank or several ranks carried, and `seconds` from the start to the last verified byte, the longest.

    `pause_s` is how long a generation worker paused: with the hooks, the commit, and the state that the engine recomputes.
    """

    version: int
    bytes_sent: int
    bytes_received: int
    seconds: float
    pause_s: float = 0.0


def merge_reports(parts: Sequence[RefitReport]) -> RefitReport:
    """Merges the reports of several ranks; associative. Raises RunError if their versions differ."""
    versions = {part.version for part in parts}
    if len(versions) != 1:
        raise RunError(
            f"a refit reported the versions {sorted(versions)}; all workers of a refit must carry the same version"
        )
    return RefitReport(
        versions.pop(),
        sum(part.bytes_sent for part in parts),
        sum(part.bytes_received for part in parts),
        max(part.seconds for part in parts),
        max(part.pause_s for part in parts),
    )
