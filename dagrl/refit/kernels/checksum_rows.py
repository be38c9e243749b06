"""Describes the memory that a checksum covers as rows: the table of `checksum_kernel.py`, which reads them in place.

This is arithmetic on addresses and needs no GPU; tests read the rows' bytes on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dagrl.refit.kernels.rows import StridedRows, as_rows

if TYPE_CHECKING:
    from torch import Tensor

WORD = 8  # bytes
MOST_UNITS = 1 << 30  # per entry: the kernel counts them in 32 bits

SummedView = tuple[int, "Tensor"]
"""A view of any strides that a checksum covers, and the offset of its bytes in the sum."""

ChecksumEntry = tuple[int, int, int, int, int, int, int]
"""Address, units per row, units of all rows, row stride in bytes, bytes per unit, offset of the first byte, owner."""


def in_rows(view: Tensor) -> bool:
    """Returns whether `entries` can read a view in place: not one without contiguous rows, such as a transposed one."""
    return as_rows(view, view) is not None


def entries(moves: Sequence[Sequence[SummedView]]) -> list[ChecksumEntry]:
    """Returns the rows of all views, which must be `in_rows`. The owner is the number of the move."""
    found: list[ChecksumEntry] = []
    for owner, pieces in enumerate(moves):
        for offset, view in pieces:
            rows = as_rows(view, view)
            assert rows is not None, "a view without rows is gathered first"
            for one in rows:
                found += _entries(one, offset, owner)
                offset += one.count * one.nbytes
    return found


def _entries(rows: StridedRows, offset: int, owner: int) -> Iterator[ChecksumEntry]:
    """Yields entries in words if addresses and offsets are aligned to words, otherwise in bytes."""
    stride = rows.source_stride if rows.count > 1 else 0
    begins_at_words = not any(number % WORD for number in (rows.source, stride, offset))
    whole = rows.nbytes // WORD * WORD
    if begins_at_words and (whole == rows.nbytes or rows.count == 1):
        yield from _chunks(rows.source, whole, rows.count, stride, WORD, offset, owner)
        yield from _chunks(rows.source + whole, rows.nbytes - whole, 1, 0, 1, offset + whole, owner)
    else:
        yield from _chunks(rows.source, rows.nbytes, rows.count, stride, 1, offset, owner)


def _chunks(
    address: int, nbytes: int, count: int, stride: int, unit: int, offset: int, owner: int
) -> Iterator[ChecksumEntry]:
    """Yields one entry, or several if the kernel could not count its units."""
    units = nbytes // unit
    if units > MOST_UNITS:
        raise ValueError(f"a row of {nbytes} bytes is too long for one checksum; use smaller buckets")
    if not units:
        return
    step = max(1, MOST_UNITS // units)
    for first in range(0, count, step):
        yield (
            address + first * stride,
            units,
            units * min(step, count - first),
            stride,
            unit,
            offset + first * nbytes,
            owner,
        )
