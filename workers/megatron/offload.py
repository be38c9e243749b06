"""Moves train state (weights, gradients, optimizer) off the GPU and back, so that others can have its memory meanwhile.

Storages are emptied and filled again in place (`UntypedStorage.resize_`): every view of them, Megatron's contiguous buffers,
their buckets and the optimizer's shards, stays valid, only the addresses may change. Copies go through pinned host memory
that is allocated once, on a stream of their own, so that they overlap with what runs meanwhile; a storage is freed as soon
as its own copy is done, not when all are. Without a GPU the same code moves the bytes to other host memory.
Imported only where torch is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from dagrl.errors import ConfigError, RunError

if TYPE_CHECKING:
    from workers.megatron.optimizer import Trainer

Part = Literal["weights", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)
BUCKET_BYTES = 256 << 20  # a power of two, to which torch's pinned allocator rounds up


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of one storage, and where they begin in one host bucket."""

    storage: int
    start: int
    stop: int
    bucket: int
    offset: int


def cut(sizes: Sequence[int], bucket_bytes: int) -> list[Piece]:
    """Pieces that lay storages of these sizes one after the other into buckets; in the order of the storages."""
    pieces, position = [], 0
    for storage, size in enumerate(sizes):
        start = 0
        while start < size:
            bucket, offset = divmod(position, bucket_bytes)
            length = min(size - start, bucket_bytes - offset)
            pieces.append(Piece(storage, start, start + length, bucket, offset))
            start, position = start + length, position + length
    return pieces


class StateCopy:
    """Storages that can be away from their device. `keep` off: their content is not kept, they come back as zeros."""

    def __init__(self, tensors: Iterable[Tensor], stream: Any, *, keep: bool = True) -> None:
        self._storages = unique_storages(tensors)
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._stream, self._keep = stream, keep
        self._buckets: list[Tensor] = []
        self._arrived: Any = None  # event after the copies back
        self.away = False

    @property
    def nbytes(self) -> int:
        """Bytes that leave the device."""
        return sum(self._sizes)

    def offload(self) -> None:
        """Begin to copy to the host; each storage is freed when its copy is done. Does not wait."""
        self.wait()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        views = [_bytes_of(storage) for storage in self._storages]
        if self._keep:
            self._copy_out(views)
        else:
            for storage in self._storages:
                _release(storage)
        self.away = True

    def reload(self) -> None:
        """Begin to copy back; `wait` before the content is used."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            if storage.nbytes() != size:
                storage.resize_(size)
        views = [_bytes_of(storage) for storage in self._storages]
        if self._keep:
            self._copy_back(views)
        else:
            for view in views:
                view.zero_()
        self.away = False

    def wait(self) -> None:
        """Let this thread's current stream wait until the content is back."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
            self._arrived = None

    def _copy_out(self, views: Sequence[Tensor]) -> None:
        pieces, buckets = self._pieces()
        for number, piece in enumerate(pieces):
            view = views[piece.storage]
            with _on(self._stream):
                host = buckets[piece.bucket][piece.offset : piece.offset + piece.stop - piece.start]
                host.copy_(view[piece.start : piece.stop], non_blocking=True)
            if number + 1 == len(pieces) or pieces[number + 1].storage != piece.storage:  # the last of its storage
                if self._stream is not None:
                    view.record_stream(self._stream)  # the allocator reuses the memory when the copy is done
                _release(self._storages[piece.storage])

    def _copy_back(self, views: Sequence[Tensor]) -> None:
        pieces, buckets = self._pieces()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())  # the memory may still be in use there
        with _on(self._stream):
            for piece in pieces:
                host = buckets[piece.bucket][piece.offset : piece.offset + piece.stop - piece.start]
                views[piece.storage][piece.start : piece.stop].copy_(host, non_blocking=True)
        if self._stream is not None:
            self._arrived = self._stream.record_event()

    def _pieces(self) -> tuple[list[Piece], list[Tensor]]:
        pieces = cut(self._sizes, BUCKET_BYTES)
        if not self._buckets:
            count, last = divmod(self.nbytes, BUCKET_BYTES)
            sizes = [BUCKET_BYTES] * count + ([last] if last else [])
            pinned = self._stream is not None
            self._buckets = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        return pieces, self._buckets


class Offloader:
    """The state of one trainer, part by part. `stream` is None without a GPU."""

    def __init__(self, trainer: Trainer) -> None:
        device = next(trainer.model.chunks[0].parameters()).device
        self._device, self._trainer = device, trainer
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._parts: dict[Part, StateCopy] = {}
        self._due: set[Part] = set()

    def offload(self, what: Iterable[str], *, wait: bool = True) -> None:
        """Move parts to the host; with `wait` until their memory is free for other processes. Parts away stay away."""
        for part in _checked(what):
            copy = self._copy_of(part)
            self._due.discard(part)
            if not copy.away:
                if part == "gradients":
                    self._trainer.optimizer.zero_grad()  # what the optimizer made of them for itself
                copy.offload()
        if wait and self._stream is not None:
            self._stream.synchronize()
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def reload(self, what: Iterable[str]) -> None:
        """Move parts back; this thread's current stream waits for them."""
        for part in _checked(what):
            self._begin(part)
            self._copy_of(part).wait()

    def reload_soon(self, what: Iterable[str]) -> None:
        """Let parts come back at the next `begin_due`, or when they are first required."""
        self._due |= {part for part in _checked(what) if self._copy_of(part).away}

    def begin_due(self) -> None:
        """Begin to move back what is due. After the batch is on the device: its copies would queue behind these."""
        for part in sorted(self._due):
            self._begin(part)

    def _begin(self, part: Part) -> None:
        self._due.discard(part)
        if self._copy_of(part).away:
            self._copy_of(part).reload()

    def require(self, what: Iterable[Part], doing: str) -> None:
        """Make the current stream wait for parts that are on their way; RunError for parts that are away."""
        for part in what:
            copy = self._parts.get(part)
            if copy is None:
                continue
            if part in self._due:
                self._begin(part)
            if copy.away:
                raise RunError(f"{doing} needs the {part}, which are offloaded; call reload(({part!r},)) first")
            copy.wait()

    def nbytes(self, part: Part) -> int:
        """Bytes of a part."""
        return self._copy_of(part).nbytes

    def _copy_of(self, part: Part) -> StateCopy:
        if part not in self._parts:
            tensors = {
                "weights": self._trainer.weight_tensors,
                "gradients": self._trainer.gradient_tensors,
                "optimizer": self._trainer.optimizer_tensors,
            }[part]()
            self._parts[part] = StateCopy(tensors, self._stream, keep=part != "gradients")
        return self._parts[part]


def unique_storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages of tensors, each once, empty ones left out."""
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def _checked(what: Iterable[str]) -> list[Part]:
    wanted = (what,) if isinstance(what, str) else tuple(what)
    unknown = [part for part in wanted if part not in PARTS]
    if unknown:
        raise ConfigError(f"offload or reload of {unknown[0]!r}; expected some of {', '.join(PARTS)}")
    return [part for part in PARTS if part in wanted]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _release(storage: torch.UntypedStorage) -> None:
    """Free a storage's memory; host memory that a NumPy array looks at as well has to stay."""
    if storage.resizable():
        storage.resize_(0)


def _on(stream: Any) -> Any:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
