"""Buckets in memory: views of live tensors, views of staging memory, and the copies between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from dagrl.channels.base import as_bytes
from dagrl.errors import RefitPlanError
from dagrl.refit.copies import BatchedCopy
from dagrl.refit.moves import Move, TransferBucket, bucket_offsets
from dagrl.refit.quantize import BlockQuantizer, scale_shape
from dagrl.refit.slices import STACKED, Box, numbered

if TYPE_CHECKING:
    import torch

    from dagrl.refit.checksum_kernel import ChecksumTable

Side = Literal["source", "target"]
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
    """One side of one bucket: its parts of live tensors, the message that travels, and the copies between the two.

    `side` says which half of each move is local. A bucket that is one contiguous part and needs no cast is its own
    message (`direct`); any other is staged in a buffer given to `bind`.
    """

    def __init__(self, bucket: TransferBucket, tensors: Tensors, side: Side) -> None:
        import torch

        self.bucket = bucket
        self.side = side
        self.live = [live_parts(move, tensors, side, bucket.relay) for move in bucket.moves]
        self._scales = [_live_scales(move, tensors, side) for move in bucket.moves]
        self._pairs: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # live parts, and their places in the message
        self._owners: list[int] = []  # the move of each of these pairs
        self._copies: dict[Side, BatchedCopy] = {}  # from this side to the other, made when first needed
        self._quantizer = BlockQuantizer([])
        self.message = torch.empty(0, dtype=torch.uint8)
        self.checksums: ChecksumTable | None = None  # made by `verify.prepare_checksums`
        self.alone = False  # nothing travels while it is packed or unpacked
        part, move = self.live[0][0], bucket.moves[0]
        alone = len(bucket.moves) == 1 and len(self.live[0]) == 1 and move.scales is None
        self.direct = alone and part.is_contiguous() and part.dtype == wire_dtype(move)
        self.exact = all(
            move.scales is not None or part.dtype == wire_dtype(move)
            for move, parts in zip(bucket.moves, self.live, strict=True)
            for part in parts
        )
        if self.direct:
            self.message = as_bytes(part)

    def bind(self, staging: torch.Tensor) -> None:
        """Use `staging` (uint8, at least `bucket.nbytes`) from now on."""
        import torch

        if self.direct:
            return
        self.message, self.checksums = staging[: self.bucket.nbytes], None
        self._pairs, self._owners, self._copies = ([], []), [], {}
        quantized: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # weight, its place, its scales' place
        offsets = bucket_offsets(self.bucket.moves)
        for owner, (move, parts, scales) in enumerate(zip(self.bucket.moves, self.live, self._scales, strict=True)):
            offset = offsets[owner]
            name = move.source if self.side == "source" else move.target
            places = _places(staging, offset, wire_dtype(move), move.extents, STACKED in name)
            if move.scales is None:
                self._pair(owner, parts, places)
                continue
            shape, where = scale_shape(move.extents), offset + move.scale_offset
            stored = _places(staging, where, torch.float32, shape, STACKED in name)
            if scales:
                self._pair(owner, [*parts, *scales], [*places, *stored])
            else:
                quantized += zip(parts, places, stored, strict=True)
        self._quantizer = BlockQuantizer(quantized)
        self.prepare(self.side)

    def pack(self) -> None:
        """Copy the live parts into the message, one launch for all where the backend has it; quantize where asked."""
        self._copy("source")
        self._quantizer.run()

    def unpack(self) -> None:
        """Copy the message into the live parts, cast where their dtype differs."""
        self._copy("target")

    def repack(self) -> None:
        """Copy what was unpacked back into the message, to compare it with what came."""
        self._copy("source")

    def differing(self, message: torch.Tensor) -> list[Move]:
        """The moves whose live parts are not what `message` would make of them."""
        import torch

        if self.direct:
            return [] if torch.equal(self.message, message) else [self.bucket.moves[0]]
        self.message.copy_(message)
        wrong = {
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

    def _copy(self, side: Side) -> None:
        """As the source does, from the live parts to the message; or as the target does, back."""
        if self.direct or not self._owners:
            return
        self.prepare(side)
        self._copies[side].run(self.alone)

    def prepare(self, side: Side) -> None:
        """Make the copies of `side` before a refit: their table's upload would wait for a message, without a deadline."""
        if not self.direct and side not in self._copies:
            live, places = self._pairs
            self._copies[side] = BatchedCopy(places, live) if side == "source" else BatchedCopy(live, places)


def bind_staging(memories: Sequence[BucketMemory]) -> int:
    """Give `memories`, in the order of their use, two buffers in turn, as large as the largest staged one; bytes of both."""
    import torch

    staged = [memory.bucket.nbytes for memory in memories if not memory.direct]
    device = memories[0].live[0][0].device if memories else torch.device("cpu")
    slots = [torch.empty(max(staged, default=0), dtype=torch.uint8, device=device) for _ in range(2)]
    for index, memory in enumerate(memories):
        memory.bind(slots[index % 2])
    return 2 * len(slots[0])


def wire_dtype(move: Move) -> torch.dtype:
    """The dtype in which a move travels."""
    import torch

    dtype = getattr(torch, move.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def live_parts(move: Move, tensors: Tensors, side: Side, relay: bool = False) -> list[torch.Tensor]:
    """The local half of a move: one part, or one for each tensor of a stack. Raises RefitPlanError when it does not fit."""
    name, local = (move.source, move.source_local) if side == "source" else (move.target, move.target_local)
    parts = views(tensors, name, local, move.extents)
    for part in parts:
        _check_dtype(move, part, side, relay)
    return parts


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
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    whole = staging[offset : offset + nbytes].view(dtype).view(*shape)
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
        raise RefitPlanError(
            f"tensor {move.source!r} ({move.name}) is {part.dtype}, but the plan was made for {move.dtype} sources; "
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
            name, local = (move.source, move.source_local) if side == "source" else (move.target, move.target_local)
            yield from tensor_names(name, local)
            scales = move.source_scales if side == "source" else move.scales
            if scales is not None:
                yield from tensor_names(scales.tensor, scales.local)
