"""Buckets in memory: views of live tensors, views of staging memory, and the copies between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dagrl.channels.base import as_bytes
from dagrl.errors import RefitPlanError
from dagrl.refit.checksum_rows import Piece
from dagrl.refit.copies import BatchedCopy
from dagrl.refit.moves import Message, Move, Side, TransferBucket, aligned, place_of_run
from dagrl.refit.quantize import BlockQuantizer, scale_shape
from dagrl.refit.slices import STACKED, Box, numbered, volume

if TYPE_CHECKING:
    import torch

    from dagrl.refit.checksum_kernel import ChecksumTable

Tensors = Mapping[str, "torch.Tensor"]


def view(tensors: Tensors, name: str, local: Box, extents: Sequence[int]) -> torch.Tensor:
    """The part `local` of tensor `name`, shaped `extents` (leading dimensions of size one dropped).

    Raises RefitPlanError when the tensor is not there or is too small.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise RefitPlanError(f"the plan names the tensor {name!r}, which this worker lacks; it has {sorted(tensors)[:8]}")
    fits = tensor.dim() == len(local) and all(stop <= size for (_, stop), size in zip(local, tensor.shape, strict=True))
    if not fits:
        raise RefitPlanError(f"the plan wants {local} of tensor {name!r}, but its shape is {tuple(tensor.shape)}")
    part = tensor.detach()[tuple(slice(start, stop) for start, stop in local)]
    for _ in range(len(local) - len(extents)):
        part = part[0]
    return part


def tensor_names(name: str, local: Box) -> list[str]:
    """The tensors that `name` stands for at `local`: itself, or the tensors of a stack."""
    return [numbered(name, number) for number in range(*local[0])] if STACKED in name else [name]


def views(tensors: Tensors, name: str, local: Box, extents: Sequence[int]) -> list[torch.Tensor]:
    """As `view`, of each tensor of a stack."""
    if STACKED not in name:
        return [view(tensors, name, local, extents)]
    return [view(tensors, each, local[1:], extents[1:]) for each in tensor_names(name, local)]


class BucketMemory:
    """One side of one bucket: its parts of live tensors, the messages that travel, and the copies between the two.

    `side` says which half of each move is local. A message that is one contiguous part of a tensor and needs no cast is that
    part itself; any other is staged in a buffer given to `bind`.
    """

    def __init__(self, bucket: TransferBucket, tensors: Tensors, side: Side) -> None:
        self.bucket = bucket
        self.side = side
        self.live = [live_parts(move, tensors, side, bucket.relay) for move in bucket.moves]
        self._scales = [_live_scales(move, tensors, side) for move in bucket.moves]
        self._direct = [_in_one_piece(message, tensors, side) for message in bucket.messages]
        self.staged_bytes = _memory_bytes(
            [message for message, live in zip(bucket.messages, self._direct, strict=True) if live is None]
        )
        """What `bind` takes of its buffer, and what is copied to pack or unpack."""
        self.messages: list[torch.Tensor] = []
        """The bytes of each message, once bound."""
        self._pairs: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # live parts, and their places in messages
        self._owners: list[int] = []  # the move of each of these pairs
        self._copy: BatchedCopy | None = None  # of what is staged
        self._quantizer = BlockQuantizer([])
        self.checksums: ChecksumTable | None = None  # made by `verify.prepare_checksums`
        self.alone = False  # no message wants multiprocessors while it is packed, unpacked or summed

    def bind(self, staging: torch.Tensor) -> None:
        """Once: use `staging` (uint8, at least `staged_bytes`) for what is not sent or received directly."""
        quantized: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # weight, its place, its scales' place
        end = first = 0
        for message, live in zip(self.bucket.messages, self._direct, strict=True):
            if live is None:
                memory = staging[end : end + message.nbytes]
                end += aligned(message.nbytes)
                quantized += self._stage(message, memory, first)
            self.messages.append(memory if live is None else live)
            first += len(message.moves)
        self._quantizer = BlockQuantizer(quantized)
        parts, places = self._pairs
        targets, sources = (places, parts) if self.side == "source" else (parts, places)
        # Now, as its table's upload would wait in a refit for a message, without a deadline.
        self._copy = BatchedCopy(targets, sources) if parts else None

    def _stage(
        self, message: Message, memory: torch.Tensor, first: int
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Pair the parts of a message, whose moves count from `first`, with their places; what is to be quantized."""
        import torch

        quantized: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for owner, (move, offset) in enumerate(zip(message.moves, message.offsets, strict=True), first):
            parts, scales = self.live[owner], self._scales[owner]
            stacked = STACKED in move.half(self.side)[0]
            places = _places(memory, offset, wire_dtype(move), move.extents, stacked)
            if move.scales is None:
                self._pair(owner, parts, places)
                continue
            stored = _places(memory, offset + move.scale_offset, torch.float32, scale_shape(move.extents), stacked)
            if scales:
                self._pair(owner, [*parts, *scales], [*places, *stored])
            else:
                quantized += zip(parts, places, stored, strict=True)
        return quantized

    def pack(self) -> None:
        """Copy the live parts into the message, one launch for all where the backend has it; quantize where asked."""
        self._run_copy()
        self._quantizer.run(self.alone)

    def unpack(self) -> None:
        """Copy the message into the live parts, cast where their dtype differs."""
        self._run_copy()

    def summed(self) -> list[list[Piece]]:
        """What the checksum of each move is of: its live parts and scales, or where it is cast or quantized, its message.

        What lies between a move and its scales in a message is in none of the pieces.
        """
        places = self.bytes_of_moves(self.messages)
        return [
            _live_pieces(move, parts, scales) if _travels_as_held(move, parts) else _pieces_of_message(move, place)
            for move, parts, scales, place in zip(self.bucket.moves, self.live, self._scales, places, strict=True)
        ]

    def bytes_of_moves(self, messages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The bytes of each move in `messages`, which are the bucket's own or others of its sizes."""
        return [
            memory[at : at + move.nbytes]
            for message, memory in zip(self.bucket.messages, messages, strict=True)
            for at, move in zip(message.offsets, message.moves, strict=True)
        ]

    def differing(self, came: Sequence[torch.Tensor]) -> list[Move]:
        """The moves whose live parts are not what the messages `came` would make of them."""
        import torch

        staged = set(self._owners)
        ours, theirs = self.bytes_of_moves(self.messages), self.bytes_of_moves(came)
        wrong = {
            owner
            for owner, pair in enumerate(zip(ours, theirs, strict=True))
            if owner not in staged and not torch.equal(*pair)
        }
        for live, mine, other in zip(self._direct, self.messages, came, strict=True):
            if live is None:
                mine.copy_(other)
        wrong |= {
            owner
            for owner, live, place in zip(self._owners, *self._pairs, strict=True)
            if not torch.equal(_bits(live), _bits(place.to(live.dtype)))
        }
        return [self.bucket.moves[owner] for owner in sorted(wrong)]

    def _pair(self, owner: int, live: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
        self._owners += [owner] * len(live)
        for one, place in zip(live, places, strict=True):
            same = one.dtype == place.dtype
            self._pairs[0].append(_raw(one) if same else one)
            self._pairs[1].append(_raw(place) if same else place)

    def _run_copy(self) -> None:
        if self._copy is not None:
            self._copy.run(self.alone)


def _travels_as_held(move: Move, parts: Sequence[torch.Tensor]) -> bool:
    return all(part.dtype == wire_dtype(move) for part in parts)


def _live_pieces(move: Move, parts: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[Piece]:
    found: list[Piece] = []
    for begin, some in ((0, parts), (move.scale_offset, scales)):
        for one in some:
            found.append((begin, _raw(one)))
            begin += one.nbytes
    return found


def _pieces_of_message(move: Move, place: torch.Tensor) -> list[Piece]:
    if move.scales is None:
        return [(0, place)]
    return [(0, place[: volume(move.box)]), (move.scale_offset, place[move.scale_offset :])]  # FP8: a byte an element


def bind_staging(memories: Sequence[BucketMemory]) -> int:
    """Give `memories`, in the order of their use, two buffers in turn, as large as one of them needs; bytes of both."""
    import torch

    largest = max((memory.staged_bytes for memory in memories), default=0)
    device = memories[0].live[0][0].device if memories else torch.device("cpu")
    slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
    for index, memory in enumerate(memories):
        memory.bind(slots[index % 2])
    return 2 * largest


def spare_messages(memories: Sequence[BucketMemory]) -> list[list[torch.Tensor]]:
    """Other memory for the messages of each, in two buffers in turn."""
    import torch

    largest = max((_memory_bytes(memory.bucket.messages) for memory in memories), default=0)
    device = memories[0].live[0][0].device if memories else torch.device("cpu")
    spares = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
    found: list[list[torch.Tensor]] = []
    for index, memory in enumerate(memories):
        end, messages = 0, list[torch.Tensor]()
        for message in memory.bucket.messages:
            messages.append(spares[index % 2][end : end + message.nbytes])
            end += aligned(message.nbytes)
        found.append(messages)
    return found


def _memory_bytes(messages: Sequence[Message]) -> int:
    return sum(aligned(message.nbytes) for message in messages)


def wire_dtype(move: Move) -> torch.dtype:
    """The dtype in which a move travels."""
    import torch

    dtype = getattr(torch, move.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def live_parts(move: Move, tensors: Tensors, side: Side, relay: bool = False) -> list[torch.Tensor]:
    """The local half of a move: one part, or one for each tensor of a stack. Raises RefitPlanError when it does not fit."""
    parts = views(tensors, *move.half(side), move.extents)
    for part in parts:
        _check_dtype(move, part, side, relay)
    return parts


def _in_one_piece(message: Message, tensors: Tensors, side: Side) -> torch.Tensor | None:
    """The bytes of a message where they lie one behind the other in one live tensor, as they travel; otherwise None."""
    run = place_of_run(message.moves, side)
    if run is None:
        return None
    name, local = run
    part, *others = views(tensors, name, local, [stop - start for start, stop in local])
    if others or not part.is_contiguous() or part.dtype != wire_dtype(message.moves[0]):
        return None
    return as_bytes(part)


def _live_scales(move: Move, tensors: Tensors, side: Side) -> list[torch.Tensor]:
    """The local scales of a move in FP8; none on a source that quantizes."""
    scales = move.source_scales if side == "source" else move.scales
    if scales is None:
        return []
    import torch

    parts = views(tensors, scales.tensor, scales.local, scale_shape(move.extents))
    for part in parts:
        if part.dtype != torch.float32:
            raise RefitPlanError(f"the scales {scales.tensor!r} of {move.name!r} are {part.dtype}; expected torch.float32")
    return parts


def _places(
    staging: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], stacked: bool
) -> list[torch.Tensor]:
    """Where in its message a box of `shape` lies; of a stack of tensors, where each of them does."""
    nbytes = math.prod(shape) * dtype.itemsize
    whole = staging[offset : offset + nbytes].view(dtype).view(tuple(shape))
    return list(whole) if stacked else [whole]


def _raw(part: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes: few kernels know it."""
    import torch

    return part.view(torch.uint8) if part.dtype.itemsize == 1 else part


def _bits(part: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers, in which equal means equal bits."""
    import torch

    return part.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.dtype.itemsize])


def _check_dtype(move: Move, part: torch.Tensor, side: Side, relay: bool) -> None:
    wire = wire_dtype(move)
    if part.dtype == wire and (side == "target" or move.scales is None or move.source_scales is not None):
        return
    if side == "source" and move.scales is not None and _castable(part.dtype, part.dtype):
        return
    if side == "source" and not relay:
        planned = move.dtype if move.scales is None else "float64, float32, bfloat16 or float16"
        raise RefitPlanError(
            f"tensor {move.source!r} ({move.name}) is {part.dtype}, but the plan was made for {planned} sources; "
            "plan with the dtype that the sources have"
        )
    if not _castable(part.dtype, wire):
        raise RefitPlanError(
            f"parameter {move.name!r} comes as {move.dtype} and cannot become the {part.dtype} of tensor {move.target!r}; "
            "only float64, float32, bfloat16 and float16 are cast into each other"
        )


def _castable(first: torch.dtype, second: torch.dtype) -> bool:
    return all(dtype.is_floating_point and dtype.itemsize >= 2 for dtype in (first, second))


def moved_tensors(buckets: Sequence[TransferBucket], side: Side) -> Iterator[str]:
    """Names of the local tensors that the moves of `side` read or write."""
    for bucket in buckets:
        for move in bucket.moves:
            yield from tensor_names(*move.half(side))
            scales = move.source_scales if side == "source" else move.scales
            if scales is not None:
                yield from tensor_names(scales.tensor, scales.local)
