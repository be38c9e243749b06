"""Loads this rank's weights from a Hugging Face checkpoint. `hf_export.py` writes them.

Weight slices map boxes of Hugging Face parameters to local tensors. Only those boxes are read from the safetensors files.
Before anything starts, `check_hf` checks the headers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dagrl.config import Json
from dagrl.errors import CheckpointError, LayoutError
from dagrl.refit.slices import WeightSlice, expand, volume
from dagrl.workers.families.hf_config import SCORE, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
VOCABULARY_TENSORS = ("word_embeddings.weight", "output_layer.weight")
_PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")  # as safetensors names them


def read_hf_config(directory: str | Path) -> dict[str, Json]:
    """Returns the content of `config.json`. Raises CheckpointError if it cannot be read."""
    path = Path(directory) / "config.json"
    try:
        content: dict[str, Json] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; policy.model_name must be a Hugging Face directory") from error
    return content


ParameterShapes = Mapping[str, tuple[int, ...]]  # full shape of each parameter


class Stored(NamedTuple):
    """A parameter in a file. `dtype` is safetensors' name."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


def stored_parameters(directory: str | Path) -> dict[str, Stored]:
    """Returns the parameters of a checkpoint, of which it reads only file headers and sizes.

    Of an index only the names of files count, as for transformers and vLLM. Raises CheckpointError for a file that is
    missing or damaged.
    """
    stored: dict[str, Stored] = {}
    for path in _files(Path(directory)):
        with opened(path) as file:
            parts = {name: file.get_slice(name) for name in file.keys()}
            stored |= {name: Stored(path, tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    return stored


def check_hf(directory: str | Path, shapes: ParameterShapes) -> None:
    """Raises the CheckpointError that `load_hf` would raise. Reads only file headers and sizes."""
    stored = stored_parameters(directory)
    for name in chain.from_iterable(_by_file(shapes, shapes, directory, stored).values()):
        check_stored(name, stored[name], shapes[name])


def load_hf(
    directory: str | Path, slices: Sequence[WeightSlice], shapes: ParameterShapes, tensors: Mapping[str, Tensor]
) -> None:
    """Fills `tensors` from the safetensors files in `directory`. Elements without a slice (vocabulary padding) become 0.

    So does a scalar head that the files lack. Raises CheckpointError unless the files have exactly the other parameters of
    `shapes`, with those shapes.
    """
    slices = list(expand(slices))
    for name, left in uncovered(slices, tensors).items():
        if left and not name.endswith(VOCABULARY_TENSORS):
            raise CheckpointError(
                f"the weight layout does not cover {left} of the {tensors[name].numel()} elements of {name!r}"
            )
    for tensor in tensors.values():
        tensor.zero_()
    pieces: dict[str, list[WeightSlice]] = {}
    for piece in slices:
        pieces.setdefault(piece.name, []).append(piece)
    stored = stored_parameters(directory)
    for path, names in _by_file(pieces, shapes, directory, stored).items():
        with opened(path, "pt") as file:
            for name in names:
                check_stored(name, stored[name], shapes[name])
                part = file.get_slice(name)
                for piece in pieces[name]:
                    box = tuple(slice(start, stop) for start, stop in piece.box)
                    local_view(tensors[piece.tensor], piece).copy_(part[box])
    stored_as = {piece.tensor: piece.name for piece in slices}
    check_finite(directory, [(stored_as.get(name, name), tensor) for name, tensor in tensors.items()])


def check_finite(directory: str | Path, loaded: Iterable[tuple[str, Tensor]]) -> None:
    """Raises CheckpointError for a loaded parameter with NaN or infinite values."""
    import torch

    names, tensors = zip(*((name, tensor) for name, tensor in loaded if tensor.is_floating_point()), strict=True)
    finite = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors]).isfinite().tolist()  # one wait for a GPU
    for name in (name for name, is_finite in zip(names, finite, strict=True) if not is_finite):
        raise CheckpointError(
            f"{directory}: parameter {name!r} has values that are NaN or infinite; training starts from finite ones: "
            "download or convert the checkpoint again, or choose another"
        )


def has_scalar_head(directory: str | Path) -> bool:
    """Whether the checkpoint has a scalar head."""
    return SCORE in stored_parameters(directory)


def local_view(tensor: Tensor, piece: WeightSlice) -> Tensor:
    """Returns the strided view of `tensor` that holds `piece.box`, in the box's shape."""
    view = tensor[tuple(slice(start, stop) for start, stop in piece.local)]
    return view.view(view.shape[len(piece.local) - len(piece.box) :]) if len(piece.local) > len(piece.box) else view


def uncovered(slices: Sequence[WeightSlice], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns how many elements of each tensor have no slice. Raises LayoutError for a slice of a tensor that is missing."""
    left = {name: tensor.numel() for name, tensor in tensors.items()}
    for piece in slices:
        if piece.tensor not in left:
            raise LayoutError(f"the model has no {piece.tensor!r}, in which {piece.name!r} of the checkpoint would be")
        left[piece.tensor] -= volume(piece.box)
    return left


def _by_file(
    names: Iterable[str], shapes: ParameterShapes, directory: str | Path, stored: Mapping[str, Stored]
) -> dict[Path, list[str]]:
    """Groups the parameters `names` by file. The checkpoint must have all of them, and only parameters of `shapes`."""
    _check_names(stored, shapes, directory)
    by_file: dict[Path, list[str]] = {}
    for name in names:
        if name in stored:
            by_file.setdefault(stored[name].path, []).append(name)
        elif name != SCORE:  # a language model gets a scalar head of its own
            raise CheckpointError(
                f"{directory} has no parameter {name!r}, which config.json defines; the checkpoint belongs to another model"
            )
    return by_file


def _files(directory: Path) -> list[Path]:
    """Returns the files that have the weights."""
    try:
        if (directory / INDEX).exists():
            return sorted({directory / file for file in json.loads((directory / INDEX).read_text())["weight_map"].values()})
        (directory / SINGLE).stat()
        return [directory / SINGLE]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"cannot read the weights in {directory}: {error}; expected {SINGLE}, or {INDEX} and its files"
        ) from error


def _check_names(files: Collection[str], shapes: ParameterShapes, directory: str | Path) -> None:
    """Checks that the files have no foreign parameters.

    The head of tied embeddings, FP8 scales and layers for multi-token prediction are ignored.
    """
    unread = ("inv_freq", "_scale_inv", "k_scale", "v_scale", "lm_head.weight")
    others = [name for name in sorted(files) if name not in shapes and not name.endswith(unread)]
    if others:
        model = ModelConfig(read_hf_config(directory))  # layers for multi-token prediction are numbered after its own
        drafts = tuple(f"model.layers.{model.layers + number}." for number in range(model.draft_layers))
        others = [name for name in others if not name.startswith(drafts)]
    if others:
        raise CheckpointError(
            f"{directory} has {len(others)} parameters that config.json does not define, such as {others[0]!r}; "
            "config.json and the weights belong to different models, or policy.backend=fsdp reads these names"
        )


@contextmanager
def opened(path: Path, framework: str = "np") -> Iterator[Any]:
    """Opens a safetensors file, which compares its size with its header. With `np` torch is not imported."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; the file is missing or damaged") from error


def check_stored(name: str, stored: Stored, expected: Sequence[int]) -> None:
    """Raises CheckpointError unless a parameter has the `expected` shape and a plain dtype."""
    if stored.shape != tuple(expected):
        raise CheckpointError(
            f"{stored.path}: parameter {name!r} has shape {list(stored.shape)}, expected {list(expected)}; "
            "config.json and the weights belong to different models"
        )
    if stored.dtype not in _PLAIN_DTYPES and stored.dtype != "I64":  # tables, such as DeepSeek V4's of experts by token
        raise CheckpointError(
            f"{stored.path}: parameter {name!r} is stored as {stored.dtype}; training starts from "
            f"{', '.join(_PLAIN_DTYPES)}: dequantize the checkpoint first (generation can be in FP8 all the same: "
            "vllm_cfg.precision)"
        )
