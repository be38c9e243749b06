"""Pieces of memory that a checksum is of, as rows that a kernel reads in place: the table of `checksum_kernel.py`.

Plain arithmetic on addresses, which needs no GPU: tests read the rows' bytes on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dagrl.refit.copies import Rows, as_rows

if TYPE_CHECKING:
    from torch import Tensor

WORD = 8  # bytes
MOST_UNITS = 1 << 30  # of an entry: the kernel counts them in 32 bits

Piece = tuple[int, "Tensor"]
"""A part of what is summed: the offset of its bytes, as if they lay in one piece, and a view of them, of any strides."""

Entry = tuple[int, int, int, int, int, int, int]
"""Address, units of a row, units of all rows, stride of rows in bytes, bytes of a unit, offset of the first byte, owner."""


def in_rows(view: Tensor) -> bool:
    """Whether `entries` can read a view in place; one of no contiguous rows, such as a transposed one, it cannot."""
    return as_rows(view, view) is not None


def entries(moves: Sequence[Sequence[Piece]]) -> list[Entry]:
    """The rows of all pieces; the owner is the number of the move. Every piece is `in_rows`."""
    found: list[Entry] = []
    for owner, pieces in enumerate(moves):
        for offset, view in pieces:
            rows = as_rows(view, view)
            assert rows is not None, "a view without rows is gathered first"
            for one in rows:
                found += _entries(one, offset, owner)
                offset += one.count * one.nbytes
    return found


def _entries(rows: Rows, offset: int, owner: int) -> Iterator[Entry]:
    """In words where all of them begin at words, of memory and of the whole; otherwise in bytes, of one row only its end."""
    stride = rows.source_stride if rows.count > 1 else 0
    begins_at_words = not any(number % WORD for number in (rows.source, stride, offset))
    whole = rows.nbytes // WORD * WORD
    if begins_at_words and (whole == rows.nbytes or rows.count == 1):
        yield from _cut(rows.source, whole, rows.count, stride, WORD, offset, owner)
        yield from _cut(rows.source + whole, rows.nbytes - whole, 1, 0, 1, offset + whole, owner)
    else:
        yield from _cut(rows.source, rows.nbytes, rows.count, stride, 1, offset, owner)


def _cut(address: int, nbytes: int, count: int, stride: int, unit: int, offset: int, owner: int) -> Iterator[Entry]:
    """Several entries only where the kernel could not count the units of one."""
    units = nbytes // unit
    if units > MOST_UNITS:
        raise ValueError(f"a row of {nbytes} bytes is too long for one checksum; plan with smaller buckets")
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
