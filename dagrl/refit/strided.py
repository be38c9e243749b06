"""Strided copies as weight slices: boxes of a parameter, and the boxes of the tensor that they are copied to.

A loader copies a strided view of a parameter into a strided view of a tensor. `copied_slices` describes any such copy as
boxes, also if the views split, join, permute or add dimensions. A tensor whose dimensions are in another order than the
parameter's is described by a view of it, `Arranged`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import TYPE_CHECKING

from dagrl.errors import RefitPlanError
from dagrl.refit.slices import Box, Scales, WeightSlice, stacked_name

if TYPE_CHECKING:
    import torch

Loop = tuple[int, int, int]  # how often it runs, and its strides in the source and in the target, in elements

NEW_DIM = -1
MOST_BOXES = 1 << 14
"""Boxes of one copy. A copy that needs more moves single elements, which a refit does not plan."""


@dataclass(frozen=True, slots=True)
class Strided:
    """A strided view: all in elements, `offset` from the start of the memory."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Strided:
        """Returns how `tensor` is in its storage."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    def empty(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a tensor of zeros with this shape and these strides, in memory of its own."""
        import torch

        return torch.zeros(1, dtype=dtype, device=device).new_empty_strided(self.shape, self.strides).zero_()

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Strided:
        """Returns a contiguous tensor of `shape`."""
        return cls(0, tuple(shape), tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))))


@dataclass(frozen=True, slots=True)
class Arranged:
    """A tensor with its dimensions in the order `dims`; `NEW_DIM` adds one of size one."""

    tensor: str
    dims: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name by which slices refer to it."""
        return f"{self.tensor}.permute({', '.join('new' if dim == NEW_DIM else str(dim) for dim in self.dims)})"

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the view."""
        view = tensor.permute([dim for dim in self.dims if dim != NEW_DIM])
        for at, dim in enumerate(self.dims):
            view = view.unsqueeze(at) if dim == NEW_DIM else view
        return view


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """A copy between two memories: where it starts in each of them, in elements, and its loops."""

    source: int
    target: int
    loops: tuple[Loop, ...]

    @classmethod
    def between(cls, source: Strided, target: Strided) -> StridedCopy:
        """Returns the copy of one view into another of the same shape."""
        triples = zip(target.shape, source.strides, target.strides, strict=True)
        return cls(source.offset, target.offset, tuple(triple for triple in triples if triple[0] > 1))

    def through(self, copied: Strided, original: Strided) -> StridedCopy:
        """Returns the copy that reads `original` itself, where this one reads its dense copy, which is `copied` in memory.

        Raises RefitPlanError if a loop does not stay in one dimension, even when split.
        """
        start, placed = _placed(self.source, self.loops, copied, side=0)
        offset = original.offset + sum(index * stride for index, stride in zip(start, original.strides, strict=True))
        loops = tuple((loop[0], step * original.strides[dim], loop[2]) for loop, dim, step in placed)
        return replace(self, source=offset, loops=loops)


def copied_slices(
    name: str, shape: Sequence[int], copy: StridedCopy, tensor: str, target: Strided, dtype: str = ""
) -> tuple[list[WeightSlice], Arranged | None]:
    """Returns the slices of a copy from the parameter `name` of `shape` into `tensor`, and how its dimensions are arranged.

    `target` says how the tensor is in memory. None: slices refer to the tensor as it is. Raises RefitPlanError if the copy
    cannot be described by `MOST_BOXES` boxes.
    """
    parameter = Strided.whole(shape)
    loops = _merged(copy.loops)
    loops = tuple(loop for loop, *_ in _placed(copy.source, loops, parameter, side=0)[1])
    start, from_dims = _placed(
        copy.source, tuple(x for x, *_ in _placed(copy.target, loops, target, side=1)[1]), parameter, side=0
    )
    loops = tuple(loop for loop, *_ in from_dims)
    at, to_dims = _placed(copy.target, loops, target, side=1)
    ranged: dict[int, tuple[int, int]] = {}  # source dimension -> target dimension, count
    single: list[tuple[int, int, int, int, int]] = []  # count, source dimension and step, target dimension and step
    pairs = sorted(zip(from_dims, to_dims, strict=True), key=lambda pair: -pair[0][0][0])
    for ((count, _, _), dim, step), (_, to, to_step) in pairs:
        if (step, to_step) == (1, 1) and dim not in ranged and to not in [used for used, _ in ranged.values()]:
            ranged[dim] = to, count
        else:
            single.append((count, dim, step, to, to_step))
    if math.prod(count for count, *_ in single) > MOST_BOXES:
        raise RefitPlanError(f"{name!r} is copied into {tensor!r} in more than {MOST_BOXES} boxes")
    arranged = _arranged(tensor, len(shape), len(target.shape), {dim: to for dim, (to, _) in ranged.items()})
    dims = arranged.dims if arranged else tuple(range(len(target.shape)))
    extents = {to: count for to, count in ranged.values()}
    slices: list[WeightSlice] = []
    for numbers in product(*(range(count) for count, *_ in single)):
        first, place = list(start), list(at)
        for number, (_, dim, step, to, to_step) in zip(numbers, single, strict=True):
            first[dim] += number * step
            place[to] += number * to_step
        box = tuple((low, low + ranged.get(dim, (0, 1))[1]) for dim, low in enumerate(first))
        local = tuple((0, 1) if to == NEW_DIM else (place[to], place[to] + extents.get(to, 1)) for to in dims)
        slices.append(WeightSlice(name, box, arranged.name if arranged else tensor, local, dtype))
    return slices, arranged


def stack_experts(slices: Iterable[WeightSlice]) -> list[WeightSlice]:
    """Returns the slices with runs of numbered parameters as stacks: those in consecutive places of one tensor.

    `expand` undoes it. A layer's experts become one slice for each run that the rank holds.
    """
    stacked: list[WeightSlice] = []
    runs: dict[tuple[object, ...], list[tuple[int, WeightSlice]]] = defaultdict(list)
    for weight in slices:
        name, number = stacked_name(weight.name)
        lead = len(weight.local) - len(weight.box)
        if number is None or lead != 1:
            stacked.append(weight)
            continue
        at = weight.local[0][0]
        shift = number - at
        scales = weight.scales and (weight.scales.tensor, weight.scales.local[1:], weight.scales.local[0][0] - at)
        runs[name, weight.box, weight.tensor, weight.local[1:], weight.dtype, shift, scales].append((at, weight))
    for key, members in runs.items():
        members.sort(key=lambda member: member[0])
        for _, consecutive in groupby(enumerate(members), lambda entry: entry[1][0] - entry[0]):
            run = [weight for _, (_, weight) in consecutive]
            stacked.append(_stack(str(key[0]), run) if len(run) > 1 else run[0])
    return stacked


def _placed(offset: int, loops: Sequence[Loop], memory: Strided, side: int) -> tuple[list[int], list[tuple[Loop, int, int]]]:
    """Returns the index at `offset` in a dense tensor, and each loop with the dimension that it stays in and its step there.

    `side` says which stride of the loops is of this tensor: 0 the source's, 1 the target's. Splits loops that go through
    several dimensions. Raises RefitPlanError for one that cannot be split.
    """
    offset -= memory.offset
    order = sorted((dim for dim, size in enumerate(memory.shape) if size > 1), key=lambda dim: -memory.strides[dim])
    start, rest = [0] * len(memory.shape), offset
    for axis in order:
        start[axis], rest = divmod(rest, memory.strides[axis])
    placed: list[tuple[Loop, int, int]] = []
    reached = list(start)
    pending = list(reversed(loops))
    while pending:
        loop = pending.pop()
        count, stride = loop[0], loop[1 + side]
        dim = next((dim for dim in order if 0 < memory.strides[dim] <= stride), None)
        if stride == 0:
            placed.append((loop, order[-1] if order else 0, 0))
            continue
        if dim is None or stride % memory.strides[dim] or rest:
            raise RefitPlanError(f"a view with stride {stride} does not fit a tensor of shape {list(memory.shape)}")
        step = stride // memory.strides[dim]
        if start[dim] + (count - 1) * step < memory.shape[dim]:
            placed.append((loop, dim, step))
            reached[dim] += (count - 1) * step
            continue
        inner = memory.shape[dim] // step
        if memory.shape[dim] % step or start[dim] >= step or inner < 2 or count % inner:
            raise RefitPlanError(f"a view of {count} elements with stride {stride} is no box of shape {list(memory.shape)}")
        pending += [(count // inner, loop[1] * inner, loop[2] * inner), (inner, loop[1], loop[2])]
    if any(last >= size for last, size in zip(reached, memory.shape, strict=True)):
        raise RefitPlanError(f"overlapping loops in a tensor of shape {list(memory.shape)}")
    return start, placed


def _merged(loops: Sequence[Loop]) -> tuple[Loop, ...]:
    """Returns the loops with those joined that are contiguous on both sides."""
    merged: list[Loop] = []
    for loop in sorted(loops, key=lambda loop: (loop[2], loop[1])):
        inner = merged[-1] if merged else (0, 0, 0)
        if loop[1:] == (inner[0] * inner[1], inner[0] * inner[2]):
            merged[-1] = (inner[0] * loop[0], inner[1], inner[2])
        else:
            merged.append(loop)
    return tuple(reversed(merged))


def _arranged(tensor: str, dims: int, target_dims: int, ranged: dict[int, int]) -> Arranged | None:
    """Returns the arrangement in which the last `dims` dimensions are the parameter's; None if that is so already."""
    lead = target_dims - dims
    if lead >= 0 and all(to == dim + lead for dim, to in ranged.items()):
        return None
    free = [dim for dim in range(target_dims) if dim not in ranged.values()]
    unplaced = [dim for dim in range(dims) if dim not in ranged]
    chosen = dict(ranged)
    for dim in reversed(unplaced):
        chosen[dim] = free.pop() if free else NEW_DIM
    return Arranged(tensor, (*free, *(chosen[dim] for dim in range(dims))))


def _stack(name: str, run: Sequence[WeightSlice]) -> WeightSlice:
    first, last = run[0], run[-1]
    numbers = stacked_name(first.name)[1], stacked_name(last.name)[1]
    assert numbers[0] is not None and numbers[1] is not None
    box: Box = ((numbers[0], numbers[1] + 1), *first.box)
    scales = None
    if first.scales is not None and last.scales is not None:
        rows = (first.scales.local[0][0], last.scales.local[0][1])
        scales = Scales(first.scales.tensor, (rows, *first.scales.local[1:]))
    local = ((first.local[0][0], last.local[0][1]), *first.local[1:])
    return WeightSlice(name, box, first.tensor, local, first.dtype, scales)
