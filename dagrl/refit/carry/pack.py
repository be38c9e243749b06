"""Packs and unpacks buckets: views of live tensors, views of staging memory, and the copies between the two."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from dagrl.channels.base import as_bytes
from dagrl.errors import RefitPlanError
from dagrl.refit.fp8 import scale_shape
from dagrl.refit.kernels.batched import BatchedCopy, Quantized
from dagrl.refit.kernels.rows import SummedView
from dagrl.refit.slices import STACKED, Box, numbered, volume
from dagrl.refit.transfers import Move, MoveSide, TransferBucket, TransferMessage, aligned, box_of_run

if TYPE_CHECKING:
    from dagrl.refit.kernels.checksum_kernel import ChecksumTable

Tensors = Mapping[str, "torch.Tensor"]


def view(tensors: Tensors, name: str, local: Box, extents: Sequence[int]) -> torch.Tensor:
    """Returns the box `local` of tensor `name`, shaped `extents` (without leading dimensions of size one).

    Raises RefitPlanError if the tensor is missing or too small.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise RefitPlanError(f"the plan needs the tensor {name!r}, but this worker has {sorted(tensors)[:8]}")
    fits = tensor.dim() == len(local) and all(stop <= size for (_, stop), size in zip(local, tensor.shape, strict=True))
    if not fits:
        raise RefitPlanError(f"the plan needs {local} of tensor {name!r}, but its shape is {tuple(tensor.shape)}")
    part = tensor.detach()[tuple(slice(start, stop) for start, stop in local)]
    for _ in range(len(local) - len(extents)):
        part = part[0]
    return part


def tensor_names(name: str, local: Box) -> list[str]:
    """Returns the names of the tensors at `local`: `name` itself, or those of a stack."""
    return [numbered(name, number) for number in range(*local[0])] if STACKED in name else [name]


def views(tensors: Tensors, name: str, local: Box, extents: Sequence[int]) -> list[torch.Tensor]:
    """Returns a view of each tensor of a stack; see `view`."""
    if STACKED not in name:
        return [view(tensors, name, local, extents)]
    return [view(tensors, each, local[1:], extents[1:]) for each in tensor_names(name, local)]


class BucketMemory:
    """One side of one bucket: views of live tensors, the messages, and the copies between the two.

    `side` says which half of each move is local. A message that is contiguous in one tensor and needs no cast is a view of
    that tensor. Any other message is staged in the buffer given to `bind`.
    """

    def __init__(self, bucket: TransferBucket, tensors: Tensors, side: MoveSide) -> None:
        self.bucket = bucket
        self.side = side
        self.live = [live_views(move, tensors, side, bucket.relay) for move in bucket.moves]
        self._scales = [live_scales(move, tensors, side) for move in bucket.moves]
        self._direct = [_contiguous_message(message, tensors, side) for message in bucket.messages]
        self.staged_bytes = sum(
            aligned(message.nbytes) for message, live in zip(bucket.messages, self._direct, strict=True) if live is None
        )
        """Bytes that `bind` uses of its buffer, and that packing or unpacking copies."""
        self.messages: list[torch.Tensor] = []
        """The bytes of each message, after `bind`."""
        self._pairs: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # live views, and their views in messages
        self.checksums: ChecksumTable | None = None  # made by `verify.prepare_checksums`
        self.alone = False  # no message needs multiprocessors while it is packed, unpacked or summed

    def bind(self, staging: torch.Tensor) -> None:
        """Uses `staging` (uint8, at least `staged_bytes`) for messages that are not direct. Call once."""
        quantized: list[Quantized] = []
        end = first = 0
        for message, live in zip(self.bucket.messages, self._direct, strict=True):
            if live is None:
                memory = staging[end : end + message.nbytes]
                end += aligned(message.nbytes)
                quantized += self._stage(message, memory, first)
            self.messages.append(memory if live is None else live)
            first += len(message.moves)
        parts, places = self._pairs
        targets, sources = (places, parts) if self.side == "source" else (parts, places)
        # Upload the table now: during a refit the upload would wait for messages, without a deadline.
        self._copy = BatchedCopy(targets, sources, quantized)

    def _stage(self, message: TransferMessage, memory: torch.Tensor, first: int) -> list[Quantized]:
        """Pairs the live views of a message with their staging views. Returns what must be quantized instead.

        The moves of the message are numbered from `first`.
        """
        quantized: list[Quantized] = []
        for owner, (move, offset) in enumerate(zip(message.moves, message.offsets, strict=True), first):
            parts, scales = self.live[owner], self._scales[owner]
            stacked = STACKED in move.half(self.side)[0]
            places = _message_parts(memory, offset, wire_dtype(move), move.extents, stacked)
            if move.scales is None:
                self._pair(parts, places)
                continue
            stored = _message_parts(memory, offset + move.scale_offset, torch.float32, scale_shape(move.extents), stacked)
            if scales:
                self._pair([*parts, *scales], [*places, *stored])
            else:
                quantized += zip(parts, places, stored, strict=True)
        return quantized

    def copy(self) -> None:
        """Packs the live views into the messages (source), or unpacks these (target), with a cast if dtypes differ."""
        self._copy.run(self.alone)

    def summed(self) -> list[list[SummedView]]:
        """Returns the memory that each move's checksum covers: live views and scales, or the message if cast or quantized.

        The gap between a move and its scales in a message is not covered.
        """
        summed: list[list[SummedView]] = []
        places = [
            memory[at : at + move.nbytes]
            for message, memory in zip(self.bucket.messages, self.messages, strict=True)
            for at, move in zip(message.offsets, message.moves, strict=True)
        ]
        moves = zip(self.bucket.moves, self.live, self._scales, places, strict=True)
        for move, parts, scales, place in moves:
            pieces: list[SummedView] = []
            if all(part.dtype == wire_dtype(move) for part in parts):
                for begin, views_of in ((0, parts), (move.scale_offset, scales)):
                    for view_of in views_of:
                        pieces.append((begin, raw(view_of)))
                        begin += view_of.nbytes
            elif move.scales is None:
                pieces = [(0, place)]
            else:  # FP8: a byte an element
                pieces = [(0, place[: volume(move.box)]), (move.scale_offset, place[move.scale_offset :])]
            summed.append(pieces)
        return summed

    def _pair(self, live: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
        for view, place in zip(live, places, strict=True):
            same = view.dtype == place.dtype
            self._pairs[0].append(raw(view) if same else view)
            self._pairs[1].append(raw(place) if same else place)


def bind_staging(memories: Sequence[BucketMemory]) -> int:
    """Binds `memories`, in the order of use, to two buffers in turn. Returns the bytes of the buffers.

    A bucket to relay is packed when all earlier messages have arrived: one buffer is enough.
    """
    largest = max((memory.staged_bytes for memory in memories), default=0)
    device = memories[0].live[0][0].device if memories else torch.device("cpu")
    buffers = 1 if all(memory.bucket.relay and memory.side == "source" for memory in memories) else 2
    slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(buffers)]
    for index, memory in enumerate(memories):
        memory.bind(slots[index % buffers])
    return buffers * largest


def wire_dtype(move: Move) -> torch.dtype:
    """Returns the dtype of a move on the wire."""
    dtype = getattr(torch, move.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def live_views(move: Move, tensors: Tensors, side: MoveSide, relay: bool = False) -> list[torch.Tensor]:
    """Returns the live views of a move, one per tensor of a stack. Raises RefitPlanError if the tensors do not fit."""
    parts = views(tensors, *move.half(side), move.extents)
    for part in parts:
        _check_dtype(move, part, side, relay)
    return parts


def _contiguous_message(message: TransferMessage, tensors: Tensors, side: MoveSide) -> torch.Tensor | None:
    """Returns the bytes of a message if one live tensor holds them contiguously, in the wire's dtype; otherwise None."""
    run = box_of_run(message.moves, side)
    if run is None:
        return None
    name, local = run
    part, *others = views(tensors, name, local, [stop - start for start, stop in local])
    if others or not part.is_contiguous() or part.dtype != wire_dtype(message.moves[0]):
        return None
    return as_bytes(part)


def live_scales(move: Move, tensors: Tensors, side: MoveSide) -> list[torch.Tensor]:
    """Returns views of the local scales of an FP8 move; none on a source that quantizes."""
    scales = move.source_scales if side == "source" else move.scales
    if scales is None:
        return []
    parts = views(tensors, scales.tensor, scales.local, scale_shape(move.extents))
    for part in parts:
        if part.dtype != torch.float32:
            raise RefitPlanError(f"the scales {scales.tensor!r} of {move.name!r} are {part.dtype}; expected torch.float32")
    return parts


def _message_parts(
    staging: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], stacked: bool
) -> list[torch.Tensor]:
    """Returns a view of `shape` in a message; for a stack of tensors, a view for each of them."""
    nbytes = math.prod(shape) * dtype.itemsize
    whole = staging[offset : offset + nbytes].view(dtype).view(tuple(shape))
    return list(whole) if stacked else [whole]


def raw(part: torch.Tensor) -> torch.Tensor:
    """Returns FP8 as bytes, as few kernels support it."""
    return part.view(torch.uint8) if part.dtype.itemsize == 1 else part


def _check_dtype(move: Move, part: torch.Tensor, side: MoveSide, relay: bool) -> None:
    wire = wire_dtype(move)
    if part.dtype == wire and (side == "target" or move.scales is None or move.source_scales is not None):
        return
    if side == "source" and move.scales is not None and _castable(part.dtype, part.dtype):
        return
    if side == "source" and _castable(part.dtype, wire) and part.dtype.itemsize > wire.itemsize:
        return  # cast as it is packed, or read by a receiver that maps it
    if side == "source" and not relay:
        planned = move.dtype if move.scales is None else "float64, float32, bfloat16 or float16"
        raise RefitPlanError(
            f"tensor {move.source!r} ({move.name}) is {part.dtype}, but the plan was made for {planned} sources; "
            "make the plan with the dtype of the sources"
        )
    if not _castable(part.dtype, wire):
        raise RefitPlanError(
            f"parameter {move.name!r} is received as {move.dtype} and cannot be cast to the {part.dtype} of tensor "
            f"{move.target!r}; only float64, float32, bfloat16 and float16 are cast to each other"
        )


def _castable(first: torch.dtype, second: torch.dtype) -> bool:
    return all(dtype.is_floating_point and dtype.itemsize >= 2 for dtype in (first, second))


class Addresses:
    """Where the tensors `names` are."""

    def __init__(self, tensors: Tensors, names: Iterable[str]) -> None:
        self._tensors, self._names = tensors, list(dict.fromkeys(names))
        self._known: list[int] | None = self._read()

    def forget(self) -> None:
        """Counts all of them as moved."""
        self._known = None

    @property
    def moved(self) -> bool:
        """Whether one of them has other memory than before."""
        return self._read() != self._known

    def _read(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters are subclasses, slow with it
            return [self._tensors[name].data_ptr() for name in self._names]


def moved_tensors(buckets: Sequence[TransferBucket], side: MoveSide) -> Iterator[str]:
    """Yields the names of the local tensors that the moves of `side` read or write."""
    for bucket in buckets:
        for move in bucket.moves:
            yield from tensor_names(*move.half(side))
            scales = move.source_scales if side == "source" else move.scales
            if scales is not None:
                yield from tensor_names(scales.tensor, scales.local)
