"""Writing the whole model as a Hugging Face checkpoint.

Follows the weight layout (`workers.megatron.weights`): each box of a HF parameter goes once, from the first rank that holds
it, to rank 0, parameter after parameter, and never more than one file's worth is held there.
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
from dagrl.process_groups import break_gloo_group
from dagrl.refit.slices import Box, WeightSlice, expand, volume
from workers.megatron.hf import INDEX, SINGLE, local_view, read_hf_config
from workers.megatron.together import together

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
    """Write the model of all ranks to `directory`, with the configuration and tokenizer of `source`.

    `slices` are those of every rank, in rank order. All ranks call this together; rank 0 receives and writes, while others
    wait in `group`, which is over Gloo and whose deadline is made for that. The directory is written beside its place and
    renamed; a model that was there before goes. CheckpointError, on all ranks, when anything else is there, a rank cannot
    read its part, or it cannot be written; also when a rank ends or passes the deadline, which breaks `group` for good.
    """
    owners = _owners(slices)
    with _broken_for_all(group, directory):
        writer = together(group, _begin, Path(directory), rank)
        parts = _Parts(tensors)
        for name, pieces in owners.items():
            whole = _gather(pieces, parts, rank, group)
            if writer is not None and whole is not None:
                writer.add(name, whole)
        together(group, parts.check)
        together(group, lambda: None if writer is None else writer.finish(Path(source)))


@contextmanager
def _broken_for_all(group: ProcessGroup | None, directory: str | Path) -> Iterator[None]:
    """Who notices that a message of the block failed breaks the group, so that nobody waits for those that follow."""
    try:
        yield
    except RuntimeError as error:
        if group is None:
            raise
        break_gloo_group(group)
        raise CheckpointError(
            f"the export to {directory} broke off: a worker ended, failed or did not answer within the deadline "
            f"(1.5 times timeouts.checkpoint_s): {error}; look for the first error of the others, and restart the group"
        ) from error


def _begin(directory: Path, rank: int) -> _Writer | None:
    _check_replaceable(directory)
    return _Writer(directory) if rank == 0 else None


def _owners(slices: Sequence[Sequence[WeightSlice]]) -> dict[str, dict[Box, tuple[int, WeightSlice]]]:
    """For each parameter, its boxes, none overlapping, each with the first rank that holds it."""
    found: dict[str, dict[Box, tuple[int, WeightSlice]]] = {}
    for rank, pieces in enumerate(slices):
        for piece in expand(pieces):
            found.setdefault(piece.name, {}).setdefault(piece.box, (rank, piece))
    return {name: found[name] for name in sorted(found)}


@dataclass
class _Parts:
    """This rank's parts. Zeros go in place of one that cannot be read, since others wait for it, and `check` raises then."""

    tensors: Mapping[str, Tensor]
    error: Exception | None = None

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype

    def read(self, piece: WeightSlice) -> Tensor:
        """A copy on the host, contiguous."""
        try:
            return local_view(self.tensors[piece.tensor], piece).contiguous().cpu()
        except Exception as error:
            self.error = self.error or error
            return self.empty(piece.box).zero_()

    def empty(self, box: Box) -> Tensor:
        """Memory on the host for a part."""
        import torch

        return torch.empty([stop - start for start, stop in box], dtype=self.dtype)

    def whole(self, shape: Sequence[int]) -> Tensor | None:
        """Memory on the host for a parameter; None where there is none, or the export has failed anyway."""
        if self.error is not None:
            return None
        try:
            return self.empty(tuple((0, size) for size in shape))
        except Exception as error:
            self.error = error
            return None

    def check(self) -> None:
        """Raise CheckpointError for the first that failed."""
        if self.error is not None:
            raise CheckpointError(f"cannot read the weights to export: {self.error}") from self.error


def _gather(
    pieces: Mapping[Box, tuple[int, WeightSlice]], parts: _Parts, rank: int, group: ProcessGroup | None
) -> Tensor | None:
    """The whole parameter on the host of rank 0; None on the others, and where something could not be read."""
    import torch.distributed as dist

    shape = [max(box[axis][1] for box in pieces) for axis in range(len(next(iter(pieces))))]
    _check_covered(next(iter(pieces.values()))[1].name, shape, list(pieces))
    whole = parts.whole(shape) if rank == 0 else None
    for box, (owner, piece) in pieces.items():
        if rank not in (0, owner):
            continue
        part = parts.read(piece) if owner == rank else parts.empty(box)
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
class _Writer:
    """Safetensors files of at most `FILE_BYTES`, named as transformers does; beside `directory` until all are there.

    When one cannot be written, `finish` raises it: until then others send what they have, and would wait if nobody took it.
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

    def finish(self, source: Path) -> None:
        if self.error is not None:
            raise CheckpointError(f"cannot write {self.partial}: {self.error}") from self.error
        dtype = str(next(iter(self.pending.values())).dtype).removeprefix("torch.")
        self._flush()
        names = {self._temporary(i): self._final(i, len(self.files)) for i in range(len(self.files))}
        for temporary, final in names.items():
            (self.partial / temporary).rename(self.partial / final)
        if len(self.files) > 1:
            weight_map = {name: self._final(i, len(self.files)) for i, file in enumerate(self.files) for name in file}
            index = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
            (self.partial / INDEX).write_text(json.dumps(index, indent=2))
        _copy_companions(source, self.partial, dtype)
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
            f"{directory} has other files than a Hugging Face model, and an export replaces all; choose a new directory"
        )


def _copy_companions(source: Path, directory: Path, dtype: str) -> None:
    """Configuration (with the dtype that was written), tokenizer and the like."""
    for path in _companions(source):
        shutil.copy2(path, directory / path.name)
    config: dict[str, Any] = read_hf_config(source)
    config.pop("torch_dtype", None)
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")


def _companions(source: Path) -> Iterator[Path]:
    return (path for path in sorted(source.iterdir()) if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES))
