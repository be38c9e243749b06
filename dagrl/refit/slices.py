"""Weight slices: boxes of global parameters, and where a rank holds them. Both sides describe their weights with these.

One slice may describe a range of a layer's experts, which differ only in their number. A name with a `*`
(`model.layers.3.mlp.experts.*.up_proj.weight`) is a stack of parameters; the number that replaces the `*` is its first
dimension. The local tensor's name also has a `*` if the rank holds each expert in its own tensor. `expand` undoes both.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dagrl.errors import RefitPlanError

Box = tuple[tuple[int, int], ...]  # one `(start, stop)` per dimension of a global tensor
TensorShapes = Mapping[str, tuple[int, ...]]  # shapes of local tensors by name, as far as slices reach
STACKED = "*"  # replaces the number in the name of a stack


@dataclass(frozen=True, slots=True)
class Scales:
    """Where the float32 scales of a blockwise FP8 box are stored. `local` counts blocks of 128x128.

    The scales of a stack of tensors are a stack too.
    """

    tensor: str
    local: Box


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """A box of one global parameter, and the strided view of a local tensor that holds it.

    `name` is the parameter's Hugging Face name and `box` the part held here. `tensor` is the local tensor's name on this
    rank and `local` the box inside it. `local` has the extents of `box`, and may have more leading dimensions of size one
    (a tensor `[E, I, H]` holds a 2-d parameter at `((e, e + 1), (0, I), (0, H))`). A local tensor with a `*` in its name is
    a stack of tensors. `dtype` is given if the tensor's dtype is not the default of all weights. With `scales` the tensor
    is blockwise FP8. Raises RefitPlanError if `box` and `local` differ in their extents.
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
        local_extents = [stop - start for start, stop in self.local]
        if local_extents != [1] * lead + extents:
            raise RefitPlanError(
                f"parameter {self.name!r}: the box {self.box} has extents {extents}, but {self.local} in tensor "
                f"{self.tensor!r} has {local_extents}; expected the same, apart from leading dimensions of size one"
            )
        if STACKED in self.tensor and STACKED not in self.name:
            raise RefitPlanError(
                f"the tensor {self.tensor!r} is a stack, but the parameter {self.name!r} in it is not; use {STACKED!r} in "
                "both names, or in neither"
            )


def expand(slices: Iterable[WeightSlice]) -> Iterator[WeightSlice]:
    """Yields the slices with every stack split into its parameters, named as in checkpoints and modules."""
    for part in slices:
        if STACKED not in part.name:
            yield part
            continue
        first = part.local[0][0]
        for offset, number in enumerate(range(*part.box[0])):
            at = (first + offset, first + offset + 1)
            yield WeightSlice(
                numbered(part.name, number),
                part.box[1:],
                numbered(part.tensor, first + offset),
                part.local[1:] if STACKED in part.tensor else (at, *part.local[1:]),
                part.dtype,
                _scales_at(part.scales, offset),
            )


def numbered(name: str, number: int) -> str:
    """Returns the name of one parameter of a stack."""
    return name.replace(STACKED, str(number))


def stacked_name(name: str) -> tuple[str, int | None]:
    """Returns the name with `*` in place of its last number, and that number."""
    parts = name.split(".")
    for at in reversed(range(len(parts))):
        if parts[at].isdecimal():
            return ".".join([*parts[:at], STACKED, *parts[at + 1 :]]), int(parts[at])
    return name, None


def _scales_at(scales: Scales | None, offset: int) -> Scales | None:
    if scales is None:
        return None
    first = scales.local[0][0] + offset
    return Scales(scales.tensor, ((first, first + 1), *scales.local[1:]))


def intersect(first: Box, second: Box) -> Box | None:
    """Returns the intersection of two boxes, or None if it is empty."""
    both: list[tuple[int, int]] = []
    for (a, b), (c, d) in zip(first, second, strict=True):
        start, stop = max(a, c), min(b, d)
        if start >= stop:
            return None
        both.append((start, stop))
    return tuple(both)


def volume(box: Box) -> int:
    """Returns the number of elements in a box."""
    elements = 1
    for start, stop in box:
        elements *= stop - start
    return elements


def full_shapes(slices: Iterable[WeightSlice]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the slices' parameters, if the slices reach their ends."""
    return _reached((part.name, part.box) for part in slices)


def tensor_shapes(slices: Iterable[WeightSlice]) -> TensorShapes:
    """Returns the shapes of the slices' local tensors. Rows after the last slice are not counted."""
    return _reached((part.tensor, part.local) for part in slices)


def _reached(boxes: Iterable[tuple[str, Box]]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, box in boxes:
        reached = tuple(stop for _, stop in box)
        shape = shapes.get(name, reached)
        shapes[name] = reached if shape == reached else tuple(map(max, shape, reached))
    return shapes


def is_contiguous_box(tensor: str, local: Box, shapes: TensorShapes) -> bool:
    """Returns whether `local` is contiguous in a contiguous tensor. A box over several tensors of a stack is not."""
    dims = list(zip(local, shapes[tensor], strict=True))
    if STACKED in tensor and local[0][1] - local[0][0] > 1:
        return False
    inner = next((dim for dim, (start, stop) in enumerate(local) if stop - start > 1), len(local))
    return all(edges == (0, size) for edges, size in dims[inner + 1 :])
