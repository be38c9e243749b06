"""Checkpoints of a train group in torch's distributed format (DCP): written by all workers together, read at any layout.

    saving = Saving(directory, pieces, group, background=True)   # on all workers; returns when the state is copied
    files = saving.finish(timeout_s)                             # size and CRC-32 of the files that this worker wrote
    load(directory, pieces, group)                               # pieces of any layout

A backend describes the state as `Piece`s: boxes of global tensors whose names and shapes do not depend on the layout. It
knows which worker writes each box; together they cover every tensor once.

Files are written straight into the directory, which the driver renames once all parts of a checkpoint are written.
Imported only where torch is.
"""

import io
import math
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dagrl.errors import CheckpointError
from dagrl.files import FileEntry
from dagrl.workers.train.offload import ALIGNMENT, BUCKET_BYTES

FILES = 2  # of each worker, written at once
Result = TypeVar("Result")
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor, and the local tensor with its content, which is written, or loaded in place.

    `shape` is that of the global tensor, `offsets` that of the box in it. `padded`: the global tensor may have another size
    in the checkpoint, as padded vocabularies have; elements beyond it are loaded as zeros.
    """

    name: str
    tensor: Tensor
    offsets: Sizes
    shape: Sizes
    padded: bool = False

    @property
    def index(self) -> MetadataIndex:
        """DCP's index of the box."""
        return MetadataIndex(self.name, torch.Size(self.offsets))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """DCP's description of where the box lies."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)


def whole(name: str, tensor: Tensor) -> Piece:
    """Describes a tensor that one worker has completely."""
    return Piece(name, tensor, (0,) * tensor.ndim, tuple(tensor.shape))


def range_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Splits the elements `start` to `stop` of a flat tensor of this shape into boxes: offsets and sizes, in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    edges = [(start, stop)] if first > last else [(start, first * row), (last * row, stop)]
    parts = [
        [((low // row, *at), (1, *size)) for at, size in range_boxes(shape[1:], low % row, low % row + high - low)]
        for low, high in edges
    ]
    yield from parts[0]
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from parts[-1] if len(parts) > 1 else ()


class Saving:
    """One checkpoint being written: create it on all workers together, and call `finish`.

    With `background` the pieces are copied to host memory first, so training may change them. A thread plans and writes with
    the other workers in `group`, in which nothing else may run meanwhile.
    """

    def __init__(self, directory: str, pieces: Sequence[Piece], group: ProcessGroup | None, *, background: bool) -> None:
        self._directory = Path(directory)
        self._pieces, self._group = (_copied(pieces) if background else pieces), group
        self._files: dict[str, FileEntry] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether all files are written, so that `finish` does not wait."""
        return not self._thread.is_alive()

    def finish(self, timeout_s: float) -> dict[str, FileEntry]:
        """Waits until all workers have written their files, and returns those of this one. Raises CheckpointError."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"{self._directory} is not written after {timeout_s:.0f} s; the disk is slow or stuck. "
                "Raise timeouts.checkpoint_s if it is slow"
            )
        if self._error is not None:
            raise CheckpointError(f"cannot write {self._directory}: {self._error}") from self._error
        return self._files

    def _write(self) -> None:
        try:
            self._files = save(self._directory, self._pieces, self._group)
        except Exception as error:  # `finish` raises it
            self._error = error
        self._pieces = ()  # frees the copies


def save(directory: Path, pieces: Sequence[Piece], group: ProcessGroup | None) -> dict[str, FileEntry]:
    """Writes the pieces of all workers. Returns size and checksum of this worker's files. Raises on all workers together."""
    writer = _Writer(directory, single_file_per_rank=True, thread_count=1)
    with _failing_together():
        dcp_save({}, storage_writer=writer, planner=_SavePieces(pieces), process_group=group)
    return writer.files


def load(directory: Path, pieces: Sequence[Piece], group: ProcessGroup | None) -> None:
    """Loads every piece in place, on all workers together. Raises CheckpointError on all if one cannot load its part.

    Nothing changes if the checkpoint has other tensors.
    """
    reader = FileSystemReader(directory)
    try:
        with torch.no_grad(), _failing_together():
            dcp_load({}, storage_reader=reader, planner=_LoadPieces(pieces), process_group=group)
    except Exception as error:
        raise CheckpointError(f"cannot load {directory}: {error}") from error


@contextmanager
def _failing_together() -> Iterator[None]:
    """Raises the first worker's own error in place of DCP's, which is no Exception."""
    try:
        yield
    except CheckpointException as failed:
        error = failed.failures[min(failed.failures)][0]
        raise (error if isinstance(error, Exception) else RuntimeError(repr(error))) from None


class StagingBuffers:
    """Copies of train state in host memory, from which a checkpoint is written while training continues.

    Copies from a GPU use pinned memory and run at link speed; training stops only for that time. Torch caches the pinned
    memory of a process, so only the first save allocates. It rounds allocations up to powers of two, so copies share
    buckets of such sizes. Dropping this object frees the memory.
    """

    def __init__(self) -> None:
        self._buckets: list[Tensor] = []  # [bytes] each
        self._filled: list[int] = []

    def copy(self, tensor: Tensor) -> Tensor:
        """Copies a tensor to host memory. A copy from a GPU is complete when the current stream reaches it."""
        return tensor.clone() if tensor.is_cpu else self.room_for(tensor).copy_(tensor, non_blocking=True)

    def room_for(self, tensor: Tensor) -> Tensor:
        """Allocates host memory for a tensor. The storage has exactly its size, because torch saves whole storages."""
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        ends = zip(self._buckets, self._filled, strict=True)
        number = next((number for number, (bucket, filled) in enumerate(ends) if filled + size <= bucket.nbytes), None)
        if number is None:
            number, least = len(self._buckets), max(size, BUCKET_BYTES)
            pinned = torch.cuda.is_available()
            self._buckets.append(torch.empty(1 << (least - 1).bit_length(), dtype=torch.uint8, pin_memory=pinned))
            self._filled.append(0)
        start, self._filled[number] = self._filled[number], self._filled[number] + size
        memory = self._buckets[number].numpy()
        return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)


def _copied(pieces: Sequence[Piece]) -> list[Piece]:
    copy = StagingBuffers().copy
    copied = [replace(piece, tensor=copy(piece.tensor)) for piece in pieces]
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return copied


class _SavePieces(DefaultSavePlanner):
    """Plans pieces instead of a state dictionary. DCP checks that they do not overlap, and of several ranks fill all."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces
        self._tensors = {piece.index: piece.tensor.detach() for piece in pieces}

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                WriteItem(
                    piece.index,
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        piece.chunk, TensorProperties.create_from_tensor(piece.tensor), torch.Size(piece.shape)
                    ),
                )
                for piece in self._pieces
            ]
        )

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index]


class _LoadPieces(DefaultLoadPlanner):
    """Plans pieces instead of a state dictionary."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {piece.index: piece for piece in pieces}

    def create_local_plan(self) -> LoadPlan:
        names: dict[str, list[Piece]] = {}
        for piece in self._pieces.values():
            names.setdefault(piece.name, []).append(piece)
        return LoadPlan([item for name, pieces in names.items() for item in self._reads(name, pieces)])

    def _reads(self, name: str, pieces: Sequence[Piece]) -> Iterable[ReadItem]:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"it has no {name}; it was saved by a run with other settings or another model")
        size = tuple(saved.size)
        if size != pieces[0].shape and not pieces[0].padded:
            raise CheckpointError(f"{name} has shape {size} in it, expected {pieces[0].shape}; it is of another model")
        return create_read_items_for_chunk_list(name, saved, [piece.chunk for piece in pieces])

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        for piece in self._pieces.values():
            if piece.padded:
                piece.tensor.zero_()
        return new_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self._pieces[read_item.dest_index].tensor
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(axis, start, length)
        return tensor


class _Writer(FileSystemWriter):
    """Writes several files at once and computes their checksums meanwhile; `files` has them by name."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        self.fs = self._summed = _SummedFiles()

    @property
    def files(self) -> dict[str, FileEntry]:
        """The files of tensors; rank 0 also writes DCP's metadata."""
        return {name: entry for name, entry in self._summed.entries.items() if name.endswith(".distcp")}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = sorted(plan.items, key=_elements, reverse=True)
        prefix = f"{plan.storage_data.prefix}{self.save_id[:8]}_"  # apart from files that an abandoned save still writes
        parts = [
            replace(plan, items=items[n::FILES], storage_data=replace(plan.storage_data, prefix=f"{prefix}{n}_"))
            for n in range(min(FILES, len(items)))
        ]
        write, torch_sums = super().write_data, torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # theirs would be a second pass over every byte
        try:
            with ThreadPoolExecutor(FILES) as pool:
                written = list(pool.map(lambda part: write(part, planner).wait(), parts))
        except Exception as error:  # other workers get it without its cause
            raise disk_error(error) from error
        finally:
            torch.serialization.set_crc32_options(torch_sums)
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for results in written for result in results])
        return future


def _elements(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes)


class _SummedFiles(FileSystem):
    """Torch's files, with the size and CRC-32 of each that was written."""

    def __init__(self) -> None:
        self.entries: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with _SummedFile(io.FileIO(path, mode)) as file:
            yield file
        self.entries[Path(path).name] = FileEntry(Path(path).stat().st_size, file.crc32)


class _SummedFile(io.BufferedWriter):
    crc32 = 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return super().write(data)


def disk_error(error: BaseException) -> Exception:
    """Returns the OSError during which `error` was raised, if any: torch's writer raises its own after a full disk's."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or (error if isinstance(error, Exception) else RuntimeError(repr(error)))
