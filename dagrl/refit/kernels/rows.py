"""Describes strided copies, and the memory that a checksum covers, as rows of contiguous bytes: the kernels' tables.

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

MOST_RUNS = 4096  # pairs of views that need more table entries than this are copied by torch
WIDE = 16  # bytes of the target that a thread writes at once, if addresses, rows and strides are multiples of it


@dataclass(frozen=True, slots=True)
class StridedRows:
    """`count` rows of `nbytes` bytes each, from address `source` to address `target`; strides in bytes.

    If it `casts`, from float32 to bfloat16, a row of the source has twice the bytes.
    """

    target: int
    source: int
    count: int
    nbytes: int
    target_stride: int
    source_stride: int
    casts: bool = False

    @property
    def wide(self) -> bool:
        """Whether everything is a multiple of `WIDE`."""
        strides = (self.target_stride, self.source_stride) if self.count > 1 else ()
        return not any(number % WIDE for number in (self.target, self.source, self.nbytes, *strides))


def as_rows(target: Tensor, source: Tensor) -> list[StridedRows] | None:
    """Returns the copy as contiguous rows; None if it makes other casts than to bfloat16, or its rows are too many or not
    contiguous, or narrow where it casts."""
    kinds = str(source.dtype), str(target.dtype)
    casts = kinds == ("torch.float32", "torch.bfloat16")
    if not casts and kinds[0] != kinds[1]:
        return None
    assert target.shape == source.shape, f"{tuple(source.shape)} does not fit {tuple(target.shape)}"
    dims = _merged(target, source)
    if dims and dims[-1][1:] != (1, 1):
        return None
    item, of_item = target.element_size(), source.element_size()
    *outer, (rows, row_target, row_source), (width, _, _) = [(1, 0, 0), *(dims or [(1, 1, 1)])]
    if not target.numel():
        return []
    if math.prod(size for size, _, _ in outer) > MOST_RUNS:
        return None
    at, of = target.data_ptr(), source.data_ptr()
    strides = row_target * item, row_source * of_item
    found = [
        StridedRows(at + to * item, of + start * of_item, rows, width * item, *strides, casts)
        for to, start in _offsets(outer)
    ]
    return found if all(row.wide for row in found if casts) else None


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


WORD = 8  # bytes
MOST_UNITS = 1 << 30
"""Most units of a table entry, which kernels count in 32 bits."""

SummedView = tuple[int, "Tensor"]  # a view of any strides that a checksum covers, and the offset of its bytes in the sum

ChecksumEntry = tuple[int, int, int, int, int, int, int]
"""Address, units per row, units of all rows, row stride in bytes, bytes per unit, offset of the first byte, owner."""


def in_rows(view: Tensor) -> bool:
    """Returns whether `entries` can read a view in place: not one without contiguous rows, such as a transposed one."""
    return as_rows(view, view) is not None


def entries(moves: Sequence[Sequence[SummedView]]) -> list[ChecksumEntry]:
    """Returns the rows of all views, which must be `in_rows`. The owner is the number of the move."""
    table: list[ChecksumEntry] = []
    for owner, pieces in enumerate(moves):
        for offset, view in pieces:
            rows = as_rows(view, view)
            assert rows is not None, "a view without rows is gathered first"
            for row in rows:
                table += _entries(row, offset, owner)
                offset += row.count * row.nbytes
    return table


def _entries(rows: StridedRows, offset: int, owner: int) -> Iterator[ChecksumEntry]:
    """Yields entries in words if addresses and offsets are aligned to words, otherwise in bytes."""
    stride = rows.source_stride if rows.count > 1 else 0
    begins_at_words = not any(number % WORD for number in (rows.source, stride, offset))
    whole = rows.nbytes // WORD * WORD
    if begins_at_words and (whole == rows.nbytes or rows.count == 1):
        yield from _entry(rows.source, whole, rows.count, stride, WORD, offset, owner)
        yield from _entry(rows.source + whole, rows.nbytes - whole, 1, 0, 1, offset + whole, owner)
    else:
        yield from _entry(rows.source, rows.nbytes, rows.count, stride, 1, offset, owner)


def _entry(address: int, nbytes: int, count: int, stride: int, unit: int, offset: int, owner: int) -> list[ChecksumEntry]:
    """Returns the entry of rows of `nbytes`; none for empty rows."""
    units = nbytes // unit
    assert units * count <= MOST_UNITS, "a move has at most the bytes of a bucket's staging memory"
    return [(address, units, units * count, stride, unit, offset, owner)] if units else []
