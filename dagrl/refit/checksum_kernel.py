"""The Triton kernel of checksums: the two sums of every part of a message in one launch, equal to those of `verify.py`.

Import this module only where there is a GPU: Triton comes with torch's CUDA builds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

if TYPE_CHECKING:
    import torch

_FIELDS = 3  # of a row: address, bytes, first tile
_WORD = 8
_TILE = 4096  # words
_WARPS = 8
PROGRAMS = 64


class ChecksumTable:
    """The sums of `parts`: vectors of bytes on one device that begin at multiples of 8; their memory must stay."""

    def __init__(self, parts: Sequence[torch.Tensor], columns: int, weight: int) -> None:
        import torch

        rows = np.array([(part.data_ptr(), len(part), 0) for part in parts], np.int64)
        tiles = -(-rows[:, 1] // (_TILE * _WORD))
        rows[:, 2] = np.cumsum(tiles) - tiles
        device = parts[0].device
        self._owners = torch.from_numpy(np.repeat(np.arange(len(rows), dtype=np.int32), tiles)).to(device)
        self._table = torch.from_numpy(rows).to(device)
        self._sums = torch.zeros(len(rows), 2, dtype=torch.int64, device=device)
        self._columns, self._weight = columns, weight

    def launch(self) -> torch.Tensor:
        """`[parts, 2]` int64, on the current stream; the same tensor each time."""
        self._sums.zero_()
        tiles = len(self._owners)
        _add_sums[(min(PROGRAMS, tiles),)](
            self._table,
            self._owners,
            self._sums,
            tiles,
            FIELDS=_FIELDS,
            TILE=_TILE,
            COLUMNS=self._columns,
            WEIGHT=self._weight,
            num_warps=_WARPS,
        )
        return self._sums


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_sums(  # type: ignore[no-untyped-def]
    table,
    owners,
    sums,
    tiles,
    FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        owner = tl.load(owners + tile)
        row = table + owner * FIELDS
        address, size = tl.load(row), tl.load(row + 1)
        whole = size // 8
        square = whole // COLUMNS * COLUMNS  # words in whole rows; the rest is a row of its own, and a broken word another
        word = (tile - tl.load(row + 2)) * TILE + tl.arange(0, TILE)
        value = tl.load(address.to(tl.pointer_type(tl.int64)) + word, mask=word < whole, other=0)
        in_row = tl.where(word < square, word // COLUMNS, square)
        column = tl.where(word < square, word % COLUMNS, word - square)
        if (tile - tl.load(row + 2) + 1) * TILE > whole:
            byte = address.to(tl.pointer_type(tl.uint8)) + word * 8
            for index in tl.static_range(8):
                inside = (word == whole) & (word * 8 + index < size)
                value += tl.load(byte + index, mask=inside, other=0).to(tl.int64) << (8 * index)
            in_row = tl.where(word == whole, whole, in_row)
            column = tl.where(word == whole, 0, column)
        weight = 2 * in_row + 1 + (2 * column + 1) * WEIGHT
        tl.atomic_add(sums + owner * 2, tl.sum(value, axis=0))
        tl.atomic_add(sums + owner * 2 + 1, tl.sum(value * weight, axis=0))
