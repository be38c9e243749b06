"""Writes the model as a Hugging Face checkpoint.

The weight layout (`dagrl.workers.megatron.weights`) says which rank holds which box of each HF parameter. The first rank
with a box sends it to rank 0, one parameter after the other. Rank 0 holds at most one file's content at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagrl.errors import CheckpointError
from dagrl.files import replace_directory
from dagrl.refit.slices import Box, WeightSlice, expand, volume
from dagrl.runtime.process_groups import break_gloo_group
from dagrl.workers.families.hf_config import DRAFT_LAYERS, SCORE, as_classifier
from dagrl.workers.megatron.groups import run_on_all_ranks
from dagrl.workers.megatron.hf_load import INDEX, SINGLE, local_view, read_hf_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

FILE_BYTES = 4 << 30
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def export_hf(
    source: str | Path,
    directory: str | Path,
    slices: Sequence[Sequence[WeightSlice]],
    tensors: Mapping[str, Tensor],
    rank: int,
    group: ProcessGroup | None,
) -> None:
    """Writes the model of all ranks to `directory`, with the configuration and tokenizer of `source`.

    `slices` are those of every rank, in rank order. All ranks call this together. Rank 0 receives and writes; the others
    wait in `group`, a Gloo group with a long deadline. The files are written to `<directory>.partial`, which then replaces
    an earlier model. Raises CheckpointError on all ranks if the directory holds anything else, a rank cannot read its part,
    or writing fails. If a rank ends or misses the deadline, that also breaks `group` permanently.
    """
    owners = _owners(slices)
    with _broken_for_all(group, directory):
        writer = run_on_all_ranks(group, _begin, Path(directory), rank)
        parts = _LocalBoxes(tensors)
        for name, pieces in owners.items():
            whole = _gather(pieces, parts, rank, group)
            if writer is not None and whole is not None:
                writer.add(name, whole)
        run_on_all_ranks(group, parts.check)
        run_on_all_ranks(group, lambda: None if writer is None else writer.finish(Path(source), parts.dtype))


@contextmanager
def _broken_for_all(group: ProcessGroup | None, directory: str | Path) -> Iterator[None]:
    """Breaks the group when a message fails, so that no rank waits for further messages."""
    try:
        yield
    except RuntimeError as error:
        if group is None:
            raise
        break_gloo_group(group)
        raise CheckpointError(
            f"the export to {directory} failed: a worker ended, failed or did not answer within the deadline "
            f"(1.5 times timeouts.checkpoint_s): {error}; see the first error of the other workers and restart the group"
        ) from error


def _begin(directory: Path, rank: int) -> _SafetensorsWriter | None:
    _check_replaceable(directory)
    return _SafetensorsWriter(directory) if rank == 0 else None


def _owners(slices: Sequence[Sequence[WeightSlice]]) -> dict[str, dict[Box, tuple[int, WeightSlice]]]:
    """Returns the boxes of each parameter, without overlap, each with the first rank that holds it."""
    found: dict[str, dict[Box, tuple[int, WeightSlice]]] = {}
    for rank, pieces in enumerate(slices):
        for piece in expand(pieces):
            found.setdefault(piece.name, {}).setdefault(piece.box, (rank, piece))
    return {name: found[name] for name in sorted(found)}


@dataclass
class _LocalBoxes:
    """This rank's boxes. An unreadable box is sent as zeros, because rank 0 waits for it, and `check` raises later."""

    tensors: Mapping[str, Tensor]
    error: Exception | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights whose slices give none."""
        return next(iter(self.tensors.values())).dtype

    def read(self, piece: WeightSlice) -> Tensor:
        """Returns a contiguous copy on the host."""
        try:
            return local_view(self.tensors[piece.tensor], piece).contiguous().cpu()
        except Exception as error:
            self.error = self.error or error
            return self.empty(piece, piece.box).zero_()

    def empty(self, piece: WeightSlice, box: Box) -> Tensor:
        """Allocates host memory for a box of the parameter that `piece` is of."""
        import torch

        dtype = getattr(torch, piece.dtype) if piece.dtype else self.dtype
        return torch.empty([stop - start for start, stop in box], dtype=dtype)

    def whole(self, piece: WeightSlice, shape: Sequence[int]) -> Tensor | None:
        """Allocates host memory for a parameter. None if that fails or the export has already failed."""
        if self.error is not None:
            return None
        try:
            return self.empty(piece, tuple((0, size) for size in shape))
        except Exception as error:
            self.error = error
            return None

    def check(self) -> None:
        """Raises CheckpointError for the first failure."""
        if self.error is not None:
            raise CheckpointError(f"cannot read the weights to export: {self.error}") from self.error


def _gather(
    pieces: Mapping[Box, tuple[int, WeightSlice]], parts: _LocalBoxes, rank: int, group: ProcessGroup | None
) -> Tensor | None:
    """Returns the whole parameter on rank 0; None on other ranks or after a failure."""
    import torch.distributed as dist

    shape = [max(box[axis][1] for box in pieces) for axis in range(len(next(iter(pieces))))]
    first = next(iter(pieces.values()))[1]
    _check_covered(first.name, shape, list(pieces))
    whole = parts.whole(first, shape) if rank == 0 else None
    for box, (owner, piece) in pieces.items():
        if rank not in (0, owner):
            continue
        part = parts.read(piece) if owner == rank else parts.empty(piece, box)
        if owner != 0:
            dist.recv(part, owner, group) if rank == 0 else dist.send(part, 0, group)
        if whole is not None:
            whole[tuple(slice(start, stop) for start, stop in box)] = part
    return whole


def _check_covered(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    elements = volume(tuple((0, size) for size in shape))
    if sum(volume(box) for box in boxes) != elements:
        raise CheckpointError(f"the weight layout covers {name!r} {list(shape)} with boxes that overlap or leave gaps")


@dataclass
class _SafetensorsWriter:
    """Writes safetensors files of at most `FILE_BYTES`, named like transformers', to `<directory>.partial` until complete.

    `finish` raises a failed write. Until then it keeps receiving, because other ranks would block otherwise.
    """

    directory: Path
    partial: Path = field(init=False)
    pending: dict[str, Tensor] = field(default_factory=dict)
    files: list[list[str]] = field(default_factory=list)
    bytes: int = 0
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.partial = Path(f"{self.directory}.partial")
        if self.partial.exists():
            shutil.rmtree(self.partial)
        self.partial.mkdir(parents=True)

    def add(self, name: str, tensor: Tensor) -> None:
        if self.error is not None:
            return
        try:
            self._add(name, tensor)
        except Exception as error:
            self.error, self.pending = error, {}

    def _add(self, name: str, tensor: Tensor) -> None:
        if self.pending and sum(_bytes(kept) for kept in self.pending.values()) + _bytes(tensor) > FILE_BYTES:
            self._flush()
        self.pending[name] = tensor

    def finish(self, source: Path, dtype: torch.dtype) -> None:
        if self.error is not None:
            raise CheckpointError(f"cannot write {self.partial}: {self.error}") from self.error
        self._flush()
        names = {self._temporary(i): self._final(i, len(self.files)) for i in range(len(self.files))}
        for temporary, final in names.items():
            (self.partial / temporary).rename(self.partial / final)
        if len(self.files) > 1:
            weight_map = {name: self._final(i, len(self.files)) for i, file in enumerate(self.files) for name in file}
            index = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
            (self.partial / INDEX).write_text(json.dumps(index, indent=2))
        written = str(dtype).removeprefix("torch.")
        _copy_companions(source, self.partial, written, scalar=any(SCORE in file for file in self.files))
        replace_directory(self.partial, self.directory)

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self.pending, self.partial / self._temporary(len(self.files)), metadata={"format": "pt"})
        self.bytes += sum(_bytes(tensor) for tensor in self.pending.values())
        self.files.append(list(self.pending))
        self.pending = {}

    @staticmethod
    def _temporary(number: int) -> str:
        return f"writing-{number:05d}.safetensors"

    @staticmethod
    def _final(number: int, count: int) -> str:
        return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _check_replaceable(directory: Path) -> None:
    if directory.exists() and not (directory / "config.json").exists() and any(directory.iterdir()):
        raise CheckpointError(
            f"{directory} is not a Hugging Face model directory, and an export replaces its content; choose a new directory"
        )


def _copy_companions(source: Path, directory: Path, dtype: str, scalar: bool) -> None:
    """Copies the configuration, with the written dtype, head and layers, and other files such as the tokenizer."""
    for path in _companions(source):
        shutil.copy2(path, directory / path.name)
    config: dict[str, Any] = read_hf_config(source)
    config.pop("torch_dtype", None)
    config = as_classifier(config) if scalar else config
    config |= {DRAFT_LAYERS: 0} if DRAFT_LAYERS in config else {}
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")


def _companions(source: Path) -> Iterator[Path]:
    return (path for path in sorted(source.iterdir()) if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES))
