"""Buckets in memory: views of live tensors, views of staging memory, and the copies between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from dagrl.errors import RefitPlanError
from dagrl.refit.plan import Move, TransferBucket, bucket_offsets
from dagrl.refit.slices import Box

if TYPE_CHECKING:
    import torch

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


class BucketMemory:
    """One side of one bucket: its parts of live tensors, the message that travels, and the copies between the two.

    `side` says which half of each move is local. A bucket that is one contiguous part and needs no cast is its own
    message (`direct`); any other is staged in a buffer given to `bind`.
    """

    def __init__(self, bucket: TransferBucket, tensors: Tensors, side: Side) -> None:
        import torch

        self.bucket = bucket
        self.live = [_live(move, tensors, side) for move in bucket.moves]
        self._staged: list[torch.Tensor] = []
        self.message = torch.empty(0, dtype=torch.uint8)
        part = self.live[0]
        self.direct = len(self.live) == 1 and part.is_contiguous() and part.dtype == wire_dtype(bucket.moves[0])
        if self.direct:
            self.message = part.reshape(-1).view(torch.uint8)

    def bind(self, staging: torch.Tensor) -> None:
        """Use `staging` (uint8, at least `bucket.nbytes`) from now on."""
        if self.direct:
            return
        self.message = staging[: self.bucket.nbytes]
        offsets = bucket_offsets(self.bucket.moves)
        self._staged = [
            staging[offset : offset + move.nbytes].view(wire_dtype(move)).view(part.shape)
            for offset, move, part in zip(offsets, self.bucket.moves, self.live, strict=True)
        ]

    def pack(self) -> None:
        """Copy the live parts into the message, one launch for all where the backend has it."""
        self._copy(self._staged, self.live)

    def unpack(self) -> None:
        """Copy the message into the live parts, cast where their dtype differs."""
        self._copy(self.live, self._staged)

    def _copy(self, to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
        import torch

        if not self.direct:
            with torch.inference_mode():  # vLLM's parameters may be inference tensors
                torch._foreach_copy_(to, of)


def bind_buckets(buckets: Sequence[TransferBucket], tensors: Tensors, side: Side) -> list[BucketMemory]:
    """The memory of all buckets of one rank; staged ones take turns in two buffers as large as the largest of them."""
    import torch

    memories = [BucketMemory(bucket, tensors, side) for bucket in buckets]
    staged = [memory.bucket.nbytes for memory in memories if not memory.direct]
    device = memories[0].live[0].device if memories else torch.device("cpu")
    slots = [torch.empty(max(staged, default=0), dtype=torch.uint8, device=device) for _ in range(2)]
    for index, memory in enumerate(memories):
        memory.bind(slots[index % 2])
    return memories


def wire_dtype(move: Move) -> torch.dtype:
    """The dtype in which a move travels."""
    import torch

    dtype = getattr(torch, move.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _live(move: Move, tensors: Tensors, side: Side) -> torch.Tensor:
    extents = [stop - start for start, stop in move.box]
    name, local = (move.source, move.source_local) if side == "source" else (move.target, move.target_local)
    part = view(tensors, name, local, extents)
    _check_dtype(move, part, side)
    return part


def _check_dtype(move: Move, part: torch.Tensor, side: Side) -> None:
    wire = wire_dtype(move)
    if part.dtype == wire:
        return
    if side == "source":
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
