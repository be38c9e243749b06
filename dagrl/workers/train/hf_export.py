"""Writes the model as a Hugging Face checkpoint.

The weight layout (`dagrl.workers.megatron.weights`) says which rank holds which box of each HF parameter. The first rank
with a box sends it to rank 0, one parameter after the other. Rank 0 holds at most one file's content at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagrl.errors import CheckpointError
from dagrl.files import replace_directory
from dagrl.refit.slices import Box, WeightSlice, expand, volume
from dagrl.runtime.process_groups import break_gloo_group
from dagrl.workers.families.hf_config import DRAFT_LAYERS, SCORE, as_classifier
from dagrl.workers.train.groups import run_on_all_ranks
from dagrl.workers.train.hf_load import INDEX, local_view, read_hf_config

if TYPE_CHECKING:
    import torch
    from huggingface_hub import StateDictSplit
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
    from huggingface_hub import split_state_dict_into_shards_factory

    export = _Export(Path(directory), tensors, rank, group, dtype=next(iter(tensors.values())).dtype)
    parameters = _parameters(slices, export.dtype)
    files = split_state_dict_into_shards_factory(
        parameters,
        get_storage_size=lambda parameter: parameter.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=FILE_BYTES,
    )
    with _broken_for_all(group, directory):
        run_on_all_ranks(group, export.begin)
        for file, names in files.filename_to_tensors.items():
            export.write(file, [parameters[name] for name in names])
        run_on_all_ranks(group, export.check)
        run_on_all_ranks(group, export.finish, Path(source), files)


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


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the checkpoint. `boxes` do not overlap; each has its slice on the first rank that holds it."""

    name: str
    shape: list[int]
    dtype: torch.dtype
    boxes: Mapping[Box, tuple[int, WeightSlice]]

    @property
    def nbytes(self) -> int:
        return volume(tuple((0, size) for size in self.shape)) * self.dtype.itemsize


def _parameters(slices: Sequence[Sequence[WeightSlice]], dtype: torch.dtype) -> dict[str, _Parameter]:
    """Returns the parameters by name, in order. Slices without a dtype have `dtype`."""
    import torch

    found: dict[str, dict[Box, tuple[int, WeightSlice]]] = {}
    for rank, pieces in enumerate(slices):
        for piece in expand(pieces):
            found.setdefault(piece.name, {}).setdefault(piece.box, (rank, piece))
    parameters = {}
    for name, boxes in sorted(found.items()):
        _, first = next(iter(boxes.values()))
        shape = [max(stop for _, stop in extents) for extents in zip(*boxes, strict=True)]
        if sum(map(volume, boxes)) != volume(tuple((0, size) for size in shape)):
            raise CheckpointError(f"the weight layout covers {name!r} {shape} with boxes that overlap or leave gaps")
        parameters[name] = _Parameter(name, shape, getattr(torch, first.dtype) if first.dtype else dtype, boxes)
    return parameters


@dataclass
class _Export:
    """One export on one rank. After a failure it keeps sending and receiving, because others wait; `check` raises it."""

    directory: Path
    tensors: Mapping[str, Tensor]
    rank: int
    group: ProcessGroup | None
    dtype: torch.dtype
    error: CheckpointError | None = None

    @property
    def partial(self) -> Path:
        return Path(f"{self.directory}.partial")

    def begin(self) -> None:
        """Creates an empty directory on rank 0."""
        if self.directory.exists() and not (self.directory / "config.json").exists() and any(self.directory.iterdir()):
            raise CheckpointError(
                f"{self.directory} is not a Hugging Face model directory, and an export replaces its content; choose a new "
                "directory"
            )
        if self.rank == 0:
            if self.partial.exists():
                shutil.rmtree(self.partial)
            self.partial.mkdir(parents=True)

    def write(self, file: str, parameters: Sequence[_Parameter]) -> None:
        """Gathers the parameters of one file on rank 0, which writes it."""
        from safetensors.torch import save_file

        content = {parameter.name: self._gather(parameter) for parameter in parameters}
        if self.rank == 0 and self.error is None:
            try:
                save_file(content, self.partial / file, metadata={"format": "pt"})
            except Exception as error:
                self._fail(f"cannot write {self.partial}", error)

    def check(self) -> None:
        """Raises the first failure."""
        if self.error is not None:
            raise self.error

    def finish(self, source: Path, files: StateDictSplit) -> None:
        """Completes the directory on rank 0: index, configuration, tokenizer. It replaces an earlier one."""
        if self.rank:
            return
        if files.is_sharded:
            index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
            (self.partial / INDEX).write_text(json.dumps(index, indent=2))
        dtype = str(self.dtype).removeprefix("torch.")
        _copy_companions(source, self.partial, dtype, scalar=SCORE in files.tensor_to_filename)
        replace_directory(self.partial, self.directory)

    def _gather(self, parameter: _Parameter) -> Tensor | None:
        """Returns the whole parameter on rank 0; None on other ranks or after a failure."""
        import torch.distributed as dist

        whole = self._whole(parameter) if self.rank == 0 and self.error is None else None
        for box, (owner, piece) in parameter.boxes.items():
            if self.rank not in (0, owner):
                continue
            part = self._read(parameter, piece) if owner == self.rank else _empty(parameter, box)
            if owner != 0:
                dist.recv(part, owner, self.group) if self.rank == 0 else dist.send(part, 0, self.group)
            if whole is not None:
                whole[tuple(slice(start, stop) for start, stop in box)] = part
        return whole

    def _whole(self, parameter: _Parameter) -> Tensor | None:
        try:
            return _empty(parameter, tuple((0, size) for size in parameter.shape))
        except Exception as error:
            self._fail("cannot read the weights to export", error)
            return None

    def _read(self, parameter: _Parameter, piece: WeightSlice) -> Tensor:
        """Returns a contiguous copy of this rank's box on the host; zeros if that fails, because rank 0 waits for it."""
        try:
            return local_view(self.tensors[piece.tensor], piece).contiguous().cpu()
        except Exception as error:
            self._fail("cannot read the weights to export", error)
            return _empty(parameter, piece.box).zero_()

    def _fail(self, text: str, error: Exception) -> None:
        if self.error is None:
            self.error = CheckpointError(f"{text}: {error}")
            self.error.__cause__ = error


def _empty(parameter: _Parameter, box: Box) -> Tensor:
    """Allocates host memory for a box of the parameter."""
    import torch

    return torch.empty([stop - start for start, stop in box], dtype=parameter.dtype)


def _copy_companions(source: Path, directory: Path, dtype: str, scalar: bool) -> None:
    """Copies the configuration, with the written dtype, head and layers, and other files such as the tokenizer."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy2(path, directory / path.name)
    config: dict[str, Any] = read_hf_config(source)
    config.pop("torch_dtype", None)
    config = as_classifier(config) if scalar else config
    config |= {DRAFT_LAYERS: 0} if DRAFT_LAYERS in config else {}
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")
