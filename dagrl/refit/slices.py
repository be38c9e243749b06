"""Boxes in global tensors, and where a rank holds them: the vocabulary in which both sides describe their weights.

Experts of a layer differ in nothing but their number, and there are many of them. So one slice may describe a range of them:
a name with a `*` (`model.layers.3.mlp.experts.*.up_proj.weight`) is the stack of the parameters that it stands for, with the
number that replaces the `*` as its first dimension. A local tensor's name may have a `*` as well, where a rank holds each
part of the stack in a tensor of its own; `expand` undoes both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dagrl.errors import RefitPlanError

Box = tuple[tuple[int, int], ...]
"""One `(start, stop)` for each dimension of a global tensor."""

TensorShapes = Mapping[str, tuple[int, ...]]
"""Of local tensors, as far as slices reach into them."""

STACKED = "*"
"""What stands for a number in the name of a stack."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Where the float32 scales of a box in blockwise FP8 lie: `local` counts blocks of 128x128.

    The scales of a stack of tensors are a stack too.
    """

    tensor: str
    local: Box


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """A box of one global parameter, and the strided view of a local tensor that holds it.

    `name` is the parameter's Hugging Face name, `box` the part of it held here, `tensor` the local tensor's name on this
    rank; `local` is the box's place inside that tensor, of the same extents as `box` up to dropped leading dimensions of
    size one (a tensor `[E, I, H]` holds a 2-d parameter at `((e, e + 1), (0, I), (0, H))`). A local tensor whose name has a
    `*` is a stack of tensors. `dtype` is the tensor's, where it is not that of the weights as a whole; with `scales` it is
    blockwise FP8. Raises RefitPlanError for a `box` and a `local` of different extents.
    """

    name: str
    box: Box
    tensor: str
    local: Box
    dtype: str = ""
    scales: Scales | None = None

    def __post_init__(self) -> None:
        lead = len(self.local) - len(self.box)
        extents = [stop - start for start, stop in self.box]
        held = [stop - start for start, stop in self.local]
        if held != [1] * lead + extents:
            raise RefitPlanError(
                f"parameter {self.name!r}: the box {self.box} is of extents {extents}, but its place {self.local} in tensor "
                f"{self.tensor!r} of {held}; expected the same, up to leading dimensions of size one"
            )
        if STACKED in self.tensor and STACKED not in self.name:
            raise RefitPlanError(
                f"the tensor {self.tensor!r} is a stack, but the parameter {self.name!r} in it is none; name both with a "
                f"{STACKED!r}, or neither"
            )


def expand(slices: Iterable[WeightSlice]) -> Iterator[WeightSlice]:
    """The same slices with every stack taken apart, under the names that checkpoints and modules have."""
    for held in slices:
        if STACKED not in held.name:
            yield held
            continue
        first = held.local[0][0]
        for offset, number in enumerate(range(*held.box[0])):
            at = (first + offset, first + offset + 1)
            yield WeightSlice(
                numbered(held.name, number),
                held.box[1:],
                numbered(held.tensor, first + offset),
                held.local[1:] if STACKED in held.tensor else (at, *held.local[1:]),
                held.dtype,
                _part_of(held.scales, offset),
            )


def numbered(name: str, number: int) -> str:
    """The name of one part of a stack."""
    return name.replace(STACKED, str(number))


def _part_of(scales: Scales | None, offset: int) -> Scales | None:
    if scales is None:
        return None
    first = scales.local[0][0] + offset
    return Scales(scales.tensor, ((first, first + 1), *scales.local[1:]))


def intersect(first: Box, second: Box) -> Box | None:
    """The box in both, or None."""
    both: list[tuple[int, int]] = []
    for (a, b), (c, d) in zip(first, second, strict=True):
        start, stop = max(a, c), min(b, d)
        if start >= stop:
            return None
        both.append((start, stop))
    return tuple(both)


def volume(box: Box) -> int:
    """Elements in a box."""
    elements = 1
    for start, stop in box:
        elements *= stop - start
    return elements


def tensor_shapes(slices: Iterable[WeightSlice]) -> TensorShapes:
    """The shapes of the tensors that slices lie in; rows behind the last slice are not seen."""
    shapes: dict[str, tuple[int, ...]] = {}
    for held in slices:
        reached = tuple(stop for _, stop in held.local)
        known = shapes.get(held.tensor, reached)
        shapes[held.tensor] = reached if known == reached else tuple(map(max, known, reached))
    return shapes


def in_one_piece(tensor: str, local: Box, shapes: TensorShapes) -> bool:
    """Whether `local` is one piece of the memory of a tensor that has its elements in order; a stack of tensors is none."""
    dims = list(zip(local, shapes[tensor], strict=True))
    if STACKED in tensor and local[0][1] - local[0][0] > 1:
        return False
    inner = next((dim for dim, (start, stop) in enumerate(local) if stop - start > 1), len(local))
    return all(edges == (0, size) for edges, size in dims[inner + 1 :])
