"""Moves train state (weights, gradients, optimizer) off the GPU and back, to free its memory for other processes.

Storages are emptied and refilled in place (`UntypedStorage.resize_`). Every view of them (Megatron's contiguous buffers,
their buckets, the optimizer's shards) stays valid; only addresses may change. Copies use pinned host memory, allocated once,
and their own stream, so they overlap with other work. Each storage is freed as soon as its own copy is done. Without a GPU
the same code moves the bytes to other host memory. Imported only where torch is.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dagrl.errors import ConfigError, RunError

ALIGNMENT = 16  # bytes, of the widest element type
BUCKET_BYTES = 256 << 20  # of pinned host memory: a power of two, to which torch's allocator rounds up

StatePart = Literal["weights", "gradients", "optimizer"]
STATE_PARTS: tuple[StatePart, ...] = get_args(StatePart)


@dataclass(frozen=True)
class StorageSpan:
    """Bytes [start, stop) of one storage, and their offset in a host bucket."""

    storage: int
    start: int
    stop: int
    bucket: int
    offset: int


def bucket_spans(sizes: Sequence[int], bucket_bytes: int) -> list[StorageSpan]:
    """Returns the spans that lay storages of these sizes into buckets one after the other, in order."""
    spans, position = [], 0
    for storage, size in enumerate(sizes):
        start = 0
        while start < size:
            bucket, offset = divmod(position, bucket_bytes)
            length = min(size - start, bucket_bytes - offset)
            spans.append(StorageSpan(storage, start, start + length, bucket, offset))
            start, position = start + length, position + length
    return spans


class StateCopy:
    """Storages that can be moved off their device. Without `keep` their content is dropped, and they return as zeros."""

    def __init__(self, tensors: Iterable[Tensor], stream: Any, *, keep: bool = True) -> None:
        self._storages = unique_storages(tensors)
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._stream, self._keep = stream, keep
        self._buckets: list[Tensor] = []
        self._arrived: Any = None  # event after the copies to the device
        self.away = False

    @property
    def nbytes(self) -> int:
        """Bytes that an offload frees on the device."""
        return sum(self._sizes)

    def offload(self) -> None:
        """Starts copying to the host. Each storage is freed when its copy is done. Does not wait."""
        self.wait()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        if self._keep:
            self._copy_out([_bytes_of(storage) for storage in self._storages])
        else:
            for storage in self._storages:
                _release(storage)
        self.away = True

    def reload(self) -> None:
        """Starts copying back. Call `wait` before using the content."""
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
        """Makes this thread's current stream wait until the content is back."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
            self._arrived = None

    def _copy_out(self, views: Sequence[Tensor]) -> None:
        spans, buckets = self._host_spans()
        for number, span in enumerate(spans):
            view = views[span.storage]
            with _on(self._stream):
                host = buckets[span.bucket][span.offset : span.offset + span.stop - span.start]
                host.copy_(view[span.start : span.stop], non_blocking=True)
            if number + 1 == len(spans) or spans[number + 1].storage != span.storage:  # last span of its storage
                if self._stream is not None:
                    view.record_stream(self._stream)  # the allocator reuses the memory after the copy
                _release(self._storages[span.storage])

    def _copy_back(self, views: Sequence[Tensor]) -> None:
        spans, buckets = self._host_spans()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())  # other work may still use the memory
        with _on(self._stream):
            for span in spans:
                host = buckets[span.bucket][span.offset : span.offset + span.stop - span.start]
                views[span.storage][span.start : span.stop].copy_(host, non_blocking=True)
        if self._stream is not None:
            self._arrived = self._stream.record_event()

    def _host_spans(self) -> tuple[list[StorageSpan], list[Tensor]]:
        spans = bucket_spans(self._sizes, BUCKET_BYTES)
        if not self._buckets:
            count, last = divmod(self.nbytes, BUCKET_BYTES)
            sizes = [BUCKET_BYTES] * count + ([last] if last else [])
            pinned = self._stream is not None
            self._buckets = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        return spans, self._buckets


class Offloader:
    """Moves the state of one trainer, part by part. `tensors` returns the tensors of a part."""

    def __init__(self, device: torch.device, tensors: Callable[[StatePart], list[Tensor]]) -> None:
        self._device, self._tensors = device, tensors
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._parts: dict[StatePart, StateCopy] = {}
        self._due: set[StatePart] = set()

    def offload(self, what: Iterable[str], *, wait: bool = True) -> None:
        """Moves parts to the host. With `wait`, returns when other processes can use their memory. Skips offloaded parts."""
        for part in _checked(what):
            copy = self._copy_of(part)
            self._due.discard(part)
            if not copy.away:
                copy.offload()
        if wait and self._stream is not None:
            self._stream.synchronize()
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def reload(self, what: Iterable[str]) -> None:
        """Moves parts back. This thread's current stream waits for them."""
        for part in _checked(what):
            self._begin(part)
            self._copy_of(part).wait()

    def reload_soon(self, what: Iterable[str]) -> None:
        """Schedules parts to come back at the next `begin_due`, or when first required."""
        self._due |= {part for part in _checked(what) if self._copy_of(part).away}

    def begin_due(self) -> None:
        """Starts moving scheduled parts back. Call it after uploading the batch, whose copies would queue behind these."""
        for part in sorted(self._due):
            self._begin(part)

    def _begin(self, part: StatePart) -> None:
        self._due.discard(part)
        if self._copy_of(part).away:
            self._copy_of(part).reload()

    def require(self, what: Iterable[StatePart], doing: str) -> None:
        """Makes the current stream wait for parts in transit. Raises RunError for offloaded parts."""
        for part in what:
            copy = self._parts.get(part)
            if copy is None:
                continue
            if part in self._due:
                self._begin(part)
            if copy.away:
                raise RunError(f"{doing} needs the {part}, which are offloaded; call reload(({part!r},)) first")
            copy.wait()

    def nbytes(self, part: StatePart) -> int:
        """Returns the bytes of a part."""
        return self._copy_of(part).nbytes

    def _copy_of(self, part: StatePart) -> StateCopy:
        if part not in self._parts:
            self._parts[part] = StateCopy(self._tensors(part), self._stream, keep=part != "gradients")
        return self._parts[part]


def unique_storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Returns the distinct non-empty storages of tensors."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in storages.values() if storage.nbytes()]


def _checked(what: Iterable[str]) -> list[StatePart]:
    parts = (what,) if isinstance(what, str) else tuple(what)
    unknown = [part for part in parts if part not in STATE_PARTS]
    if unknown:
        raise ConfigError(f"cannot offload or reload {unknown[0]!r}; expected some of {', '.join(STATE_PARTS)}")
    return [part for part in STATE_PARTS if part in parts]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _release(storage: torch.UntypedStorage) -> None:
    """Frees a storage's memory. Keeps host memory that a NumPy array shares, or that is mapped from a file."""
    if storage.resizable():
        storage.resize_(0)


def _on(stream: Any) -> Any:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
