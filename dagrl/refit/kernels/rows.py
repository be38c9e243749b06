"""Describes strided copies as rows of contiguous bytes: the copy kernel's table.

This is arithmetic on addresses and needs no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MOST_RUNS = 4096
"""Pairs of views that need more table entries than this are copied by torch."""


@dataclass(frozen=True, slots=True)
class StridedRows:
    """`count` rows of `nbytes` bytes each, from address `source` to address `target`; strides in bytes."""

    target: int
    source: int
    count: int
    nbytes: int
    target_stride: int
    source_stride: int


def as_rows(target: Tensor, source: Tensor) -> list[StridedRows] | None:
    """Returns the copy as contiguous rows; None if it casts, or if its rows are not contiguous or too many."""
    if target.dtype != source.dtype:
        return None
    assert target.shape == source.shape, f"{tuple(source.shape)} does not fit {tuple(target.shape)}"
    dims = _merged(target, source)
    if dims and dims[-1][1:] != (1, 1):
        return None
    item = target.element_size()
    *outer, (rows, row_target, row_source), (width, _, _) = [(1, 0, 0), *(dims or [(1, 1, 1)])]
    if not target.numel():
        return []
    if math.prod(size for size, _, _ in outer) > MOST_RUNS:
        return None
    at, of = target.data_ptr(), source.data_ptr()
    return [
        StridedRows(at + to * item, of + start * item, rows, width * item, row_target * item, row_source * item)
        for to, start in _offsets(outer)
    ]


def _merged(target: Tensor, source: Tensor) -> list[tuple[int, int, int]]:
    """Returns `(size, target stride, source stride)` per dimension; merges those that are contiguous on both sides."""
    dims: list[tuple[int, int, int]] = []
    for size, to, of in zip(target.shape, target.stride(), source.stride(), strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (to * size, of * size):
            dims[-1] = (dims[-1][0] * size, to, of)
        else:
            dims.append((size, to, of))
    return dims


def _offsets(dims: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Yields the offsets in target and source of every index of `dims`."""
    for index in product(*(range(size) for size, _, _ in dims)):
        yield (
            sum(i * to for i, (_, to, _) in zip(index, dims, strict=True)),
            sum(i * of for i, (_, _, of) in zip(index, dims, strict=True)),
        )
