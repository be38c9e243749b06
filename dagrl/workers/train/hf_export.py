"""Writes the model as a Hugging Face checkpoint.

Weight slices say which rank holds which box of each Hugging Face parameter. The first rank with a box sends it to rank 0,
one parameter after the other. Rank 0 holds at most one file's content at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dagrl.errors import CheckpointError
from dagrl.files import discarding, replace_directory
from dagrl.refit.slices import Box, WeightSlice, expand, volume
from dagrl.runtime.process_groups import break_gloo_group
from dagrl.workers.families.hf_config import DRAFT_LAYERS, SCORE, as_classifier
from dagrl.workers.train.groups import run_on_all_ranks
from dagrl.workers.train.hf_load import INDEX, local_view, read_hf_config

if TYPE_CHECKING:
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
    precision: str,
) -> None:
    """Writes the model of all ranks to `directory`, with the configuration and tokenizer of `source`.

    `slices` are those of every rank, in rank order. Those without a dtype are written in `precision`. All ranks call this
    together. Rank 0 receives and writes; the others
    wait in `group`, a Gloo group with a long deadline. The files are written to `<directory>.partial`, which then replaces
    an earlier model. Raises CheckpointError on all ranks if the directory holds anything else, a rank cannot read its part,
    or writing fails. If a rank ends or misses the deadline, that also breaks `group` permanently.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    target, partial = Path(directory), Path(f"{directory}.partial")
    dtype = getattr(torch, precision)
    parameters = _parameters(slices, dtype)
    files = split_state_dict_into_shards_factory(
        parameters,
        get_storage_size=lambda parameter: parameter.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=FILE_BYTES,
    )
    with _broken_for_all(group, directory), nullcontext() if rank else discarding(partial):
        run_on_all_ranks(group, _begin, target, partial, rank)
        for file, names in files.filename_to_tensors.items():
            file_parameters = [parameters[name] for name in names]
            tensors_of_file = run_on_all_ranks(group, _read, file_parameters, tensors, rank)
            _send_to_first(file_parameters, tensors_of_file, rank, group)
            run_on_all_ranks(group, _write, partial / file, tensors_of_file, rank)
        run_on_all_ranks(group, _finish, Path(source), partial, target, files, dtype, rank)


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
    def box(self) -> Box:
        return tuple((0, size) for size in self.shape)

    @property
    def nbytes(self) -> int:
        return volume(self.box) * self.dtype.itemsize


def _parameters(slices: Sequence[Sequence[WeightSlice]], dtype: torch.dtype) -> dict[str, _Parameter]:
    """Returns the parameters by name, in order. Slices without a dtype have `dtype`."""
    boxes_by_name: dict[str, dict[Box, tuple[int, WeightSlice]]] = {}
    for rank, pieces in enumerate(slices):
        for piece in expand(pieces):
            boxes_by_name.setdefault(piece.name, {}).setdefault(piece.box, (rank, piece))
    parameters = {}
    for name, boxes in sorted(boxes_by_name.items()):
        _, first = next(iter(boxes.values()))
        shape = [max(stop for _, stop in extents) for extents in zip(*boxes, strict=True)]
        if sum(map(volume, boxes)) != volume(tuple((0, size) for size in shape)):
            raise CheckpointError(f"the weight layout covers {name!r} {shape} with boxes that overlap or leave gaps")
        parameters[name] = _Parameter(name, shape, getattr(torch, first.dtype) if first.dtype else dtype, boxes)
    return parameters


def _begin(directory: Path, partial: Path, rank: int) -> None:
    """Creates an empty directory on rank 0."""
    if directory.exists() and not (directory / "config.json").exists() and any(directory.iterdir()):
        raise CheckpointError(
            f"{directory} is not a Hugging Face model directory, and an export replaces its content; choose a new directory"
        )
    if rank == 0:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)


Held = dict[str, dict[Box, "Tensor"]]
"""Boxes of parameters in host memory: those of this rank, and on rank 0 whole parameters."""


def _read(parameters: Sequence[_Parameter], tensors: Mapping[str, Tensor], rank: int) -> Held:
    """Copies what this rank gives of the parameters to host memory."""
    held: Held = {}
    try:
        for parameter in parameters:
            mine = {box: piece for box, (owner, piece) in parameter.boxes.items() if owner == rank}
            parts = {box: local_view(tensors[piece.tensor], piece) for box, piece in mine.items()}
            if rank == 0:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype)
                for box, part in parts.items():
                    whole[_index(box)] = part
                held[parameter.name] = {parameter.box: whole}
            else:
                held[parameter.name] = {box: part.to("cpu", parameter.dtype).contiguous() for box, part in parts.items()}
    except Exception as error:
        raise CheckpointError(f"cannot read the weights to export: {error}") from error
    return held


def _send_to_first(parameters: Sequence[_Parameter], held: Held, rank: int, group: ProcessGroup | None) -> None:
    """Sends the boxes of all ranks to rank 0."""
    import torch.distributed as dist

    for parameter in parameters:
        for box, (owner, _) in parameter.boxes.items():
            if owner and owner == rank:
                dist.send(held[parameter.name][box], 0, group)
            elif owner and rank == 0:
                part = torch.empty([stop - start for start, stop in box], dtype=parameter.dtype)
                dist.recv(part, owner, group)
                held[parameter.name][parameter.box][_index(box)] = part


def _write(path: Path, held: Held, rank: int) -> None:
    """Writes whole parameters on rank 0."""
    from safetensors.torch import save_file

    try:
        if rank == 0:
            save_file({name: tensor for name, parts in held.items() for tensor in parts.values()}, path, {"format": "pt"})
    except Exception as error:
        raise CheckpointError(f"cannot write {path.parent}: {error}") from error


def _finish(source: Path, partial: Path, directory: Path, files: StateDictSplit, dtype: torch.dtype, rank: int) -> None:
    """Completes the directory on rank 0: index, configuration, tokenizer. It replaces an earlier one."""
    if rank:
        return
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        (partial / INDEX).write_text(json.dumps(index, indent=2))
    name = str(dtype).removeprefix("torch.")
    _copy_companions(source, partial, name, scalar=SCORE in files.tensor_to_filename)
    replace_directory(partial, directory)


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


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
