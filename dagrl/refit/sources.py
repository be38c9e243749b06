"""Slices of a torch module: plain, FSDP2, tensor-parallel (DTensor), torchtitan's, or a Hugging Face model.

    slices = slices_of(model, dtype="bfloat16")     # what this rank holds; no communication, no copy
    tensors = tensors_of(model, dtype="bfloat16")   # the memory that these slices refer to

A DTensor's placements say which part of a parameter is in its local tensor. Names are those of the checkpoint: a
transformers model is described by the conversion that transformers applies when it saves, any other module by its own names
or by `to_hf`. The conversion runs once over meta tensors, so that a fused or transposed parameter is sent from where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from dagrl.attributes import setting
from dagrl.errors import RefitPlanError
from dagrl.refit.recording import Recorder, UnmappedError
from dagrl.refit.slices import Box, WeightSlice, intersect
from dagrl.refit.strided import NEW_DIM, Arranged, Strided, StridedCopy, copied_slices, stack_experts

if TYPE_CHECKING:
    from torch import Tensor

ToHf = Callable[[dict[str, "Tensor"]], Mapping[str, "Tensor"]]
"""Turns a module's state dict into that of its checkpoint, by views and copies of views."""


def slices_of(module: torch.nn.Module, *, dtype: str, to_hf: ToHf | None = None) -> list[WeightSlice]:
    """Returns which boxes of which checkpoint parameters this rank holds.

    `dtype` is that of the plan; slices of tensors in another dtype have theirs. `to_hf` converts to the names and shapes of
    the checkpoint, as torchtitan's `StateDictAdapter.to_hf` does. None takes the conversion of a transformers model, and the
    module's own names otherwise. Tied parameters are described once.

    Raises RefitPlanError for a placement that holds no part of a parameter (Partial), and for a checkpoint parameter that
    `to_hf` computes instead of taking it from one parameter.
    """
    return _described(module, dtype, to_hf)[0]


def tensors_of(module: torch.nn.Module, *, dtype: str, to_hf: ToHf | None = None) -> Mapping[str, Tensor]:
    """Returns the local tensors by the names in `slices_of` with the same arguments, each where its parameter has it now.

    They follow `module.to(...)` and `parameter.data = ...`. If the module gets other parameters, as by `assign` of
    `load_state_dict`, call this again.
    """
    return _described(module, dtype, to_hf)[1]


class _Live(Mapping[str, "Tensor"]):
    """The local tensors of parameters, looked up at each access."""

    def __init__(self) -> None:
        self.parameters: dict[str, tuple[Tensor, Arranged | None]] = {}

    def __getitem__(self, name: str) -> Tensor:
        parameter, arranged = self.parameters[name]
        with torch.no_grad():
            local = local_of(parameter).detach()
            return local if arranged is None else arranged.of(local)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


def _described(module: torch.nn.Module, dtype: str, to_hf: ToHf | None) -> tuple[list[WeightSlice], Mapping[str, Tensor]]:
    state = _distinct(module.state_dict(keep_vars=True))
    slices: list[WeightSlice] = []
    tensors = _Live()
    for name, tensor in state.items():
        check_plain(name, local_of(tensor))
    parts = {name: list(held_boxes(name, tensor)) for name, tensor in state.items()}
    for whole, arranged in _converted(state, to_hf or _transformers_conversion(module)):
        name = arranged.tensor if arranged else whole.tensor
        tensor = state[name]
        kind = str(tensor.dtype).removeprefix("torch.")
        place = arranged or Arranged(name, tuple(range(tensor.dim())))
        for box, at in parts[name]:
            part = _within(whole, _ordered(box, place), _ordered(at, place), "" if kind == dtype else kind)
            if part is not None:
                slices.append(part)
                tensors.parameters[part.tensor] = tensor, arranged
    return stack_experts(slices), tensors


def check_plain(name: str, tensor: Tensor) -> None:
    """Raises RefitPlanError for a tensor class with a form of its own, such as Transformer Engine's FP8."""
    kind = type(tensor)
    if kind.__module__.startswith(("transformer_engine", "torchao")):
        raise RefitPlanError(
            f"parameter {name!r} is a {kind.__module__}.{kind.__name__}, but a refit sends plain tensors. Send the master "
            "weights; what the engine holds in FP8 is quantized on the way"
        )


def _distinct(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a state dict, each under its first name."""
    named: dict[int, tuple[str, Tensor]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            named.setdefault(id(value), (name, value))
    return dict(named.values())


def _transformers_conversion(module: torch.nn.Module) -> ToHf:
    if not hasattr(module, "save_pretrained"):
        return dict
    from transformers.core_model_loading import revert_weight_conversion

    def to_hf(state: dict[str, Tensor]) -> Mapping[str, Tensor]:
        with _names_of_wrapped(module), transposed_back():
            checkpoint: dict[str, Tensor] = revert_weight_conversion(module, state)
        return checkpoint

    return to_hf


@contextmanager
def _names_of_wrapped(module: torch.nn.Module) -> Iterator[None]:
    """Gives FSDP2's classes names and modules of the classes that they wrap, by which transformers finds its conversions."""
    from torch.distributed.fsdp import FSDPModule

    with ExitStack() as stack:
        for kind in {type(part) for part in module.modules() if isinstance(part, FSDPModule)}:
            wrapped = next(base for base in kind.__mro__ if not issubclass(base, FSDPModule))
            stack.enter_context(setting(kind, __name__=wrapped.__name__, __module__=wrapped.__module__))
        yield


@contextmanager
def transposed_back() -> Iterator[None]:
    """Context in which transformers saves experts that it transposed while reading (Qwen3-VL-MoE) in their published order.

    Transformers 5.19 itself saves them transposed, which vLLM does not read.
    """
    from transformers.core_model_loading import Transpose

    with setting(Transpose, reverse_op=property(lambda step: Transpose(step.dim1, step.dim0))):
        yield


def _converted(state: Mapping[str, Tensor], to_hf: ToHf) -> Iterator[tuple[WeightSlice, Arranged | None]]:
    """Yields the slices of whole parameters: where each one of the checkpoint is in one of the module."""
    recorder = Recorder(torch.nn.Module())
    meta = {name: recorder.source(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    try:
        with torch.no_grad(), recorder:
            checkpoint = to_hf(meta)
    except UnmappedError as error:
        raise _computed(", ".join(sorted(error.names))) from error
    for name, tensor in checkpoint.items():
        view = recorder.view(tensor)
        if view is None:
            raise _computed(name)
        for piece, place in view.pieces(Strided.whole(tensor.shape)):
            copy, source = piece.through(StridedCopy.between(piece.where, place))
            if source.base.kind != "source":
                raise _computed(name)
            swapped = StridedCopy(copy.target, copy.source, tuple((count, own, other) for count, other, own in copy.loops))
            slices, arranged = copied_slices(name, tensor.shape, swapped, source.base.name, Strided.whole(source.base.shape))
            yield from ((weight, arranged) for weight in slices)


def _computed(name: str) -> RefitPlanError:
    return RefitPlanError(
        f"{name!r} of the checkpoint is computed from the module's parameters; a refit sends views of them. Load such a "
        "model under the names that the engine's loader takes unchanged"
    )


def local_of(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, in the same memory."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_boxes(name: str, tensor: Tensor) -> Iterator[tuple[Box, Box]]:
    """Yields the boxes of a parameter that this rank holds, and where they are in its local tensor."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        whole = tuple((0, size) for size in tensor.shape)
        yield whole, whole
        return
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return
    runs = []
    for dim, size in enumerate(tensor.shape):
        pieces = [torch.arange(size)]
        for axis, placement in enumerate(tensor.placements):
            pieces = _share(name, pieces, dim, placement, tensor.device_mesh.size(axis), coordinate[axis])
        runs.append(list(_runs(torch.cat(pieces).tolist())))
    for parts in product(*runs):
        yield tuple(part for part, _ in parts), tuple(at for _, at in parts)


def _share(name: str, pieces: list[Tensor], dim: int, placement: Any, count: int, at: int) -> list[Tensor]:
    """Returns the indices of one dimension that rank `at` of `count` holds, of those that are placed together so far.

    They are in pieces if a later axis of the mesh shares out the pieces: FSDP shards what each tensor-parallel rank holds.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, Replicate):
        return pieces
    if not isinstance(placement, Shard | _StridedShard):
        raise RefitPlanError(
            f"parameter {name!r} is placed as {placement}, which holds no part of its value; redistribute it to Shard or "
            "Replicate before a refit"
        )
    if placement.dim != dim:
        return pieces
    if isinstance(placement, _StridedShard):  # each of `split_factor` pieces is shared among the ranks
        return [mine for piece in _cut(pieces, int(placement.split_factor)) for mine in _cut(piece, count)[at]]
    return _cut(pieces, count)[at]


def _cut(pieces: list[Tensor], count: int) -> list[list[Tensor]]:
    """Returns `count` parts: of equally many pieces, or as `torch.chunk` cuts, with empty parts if those are too few."""
    each, rest = divmod(len(pieces), count)
    if not rest:
        return [pieces[part * each : (part + 1) * each] for part in range(count)]
    index = torch.cat(pieces)
    chunks = list(index.chunk(count)) if index.numel() else []
    return [[part] for part in [*chunks, *[index[:0]] * (count - len(chunks))]]


def _runs(index: Sequence[int]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yields the runs of consecutive indices, and their places."""
    start = 0
    for place in range(1, len(index) + 1):
        if place == len(index) or index[place] != index[place - 1] + 1:
            yield (index[start], index[place - 1] + 1), (start, place)
            start = place


def _ordered(box: Box, arranged: Arranged) -> Box:
    return tuple((0, 1) if dim == NEW_DIM else box[dim] for dim in arranged.dims)


def _within(whole: WeightSlice, part: Box, at: Box, dtype: str) -> WeightSlice | None:
    """Returns the part of a slice of the whole tensor that is in the box `held`, which a rank has at `at`."""
    both = intersect(whole.local, part)
    if both is None:
        return None
    lead = len(whole.local) - len(whole.box)
    triples = zip(both[lead:], whole.local[lead:], whole.box, strict=True)
    box = tuple((low - first + start, high - first + start) for (low, high), (first, _), (start, _) in triples)
    local = tuple((low - h[0] + a[0], high - h[0] + a[0]) for (low, high), h, a in zip(both, part, at, strict=True))
    return WeightSlice(whole.name, box, whole.tensor, local, dtype)
