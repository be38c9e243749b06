"""Triton kernel of checksums: both sums of every move of a bucket in one launch, equal to those of `carry/verify.py`.

It reads live tensors in place, row by row, so a sum does not depend on how a message was packed. Import this module only on
machines with a GPU: Triton comes with torch's CUDA builds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from dagrl.refit.kernels.rows import WORD, SummedView, entries, in_rows

_FIELDS = 8  # those of a `ChecksumEntry`, and its first tile
_TILE = 4096  # units
_WARPS = 8
PROGRAMS, PROGRAMS_ALONE = 64, 264  # while messages are sent, whose kernels need multiprocessors too, and without messages


class ChecksumTable:
    """The sums of `moves`, on one device. Their memory must stay allocated. `alone`: no messages are sent meanwhile.

    Views without contiguous rows (transposed ones) are first gathered into memory of the table, in one more launch.
    """

    def __init__(self, moves: Sequence[Sequence[SummedView]], columns: int, weight: int, upper: int, alone: bool) -> None:
        self._scattered = [view for pieces in moves for _, view in pieces if not in_rows(view)]
        self._gathered = [torch.empty(view.shape, dtype=view.dtype, device=view.device) for view in self._scattered]
        gathered = iter(self._gathered)
        placed = [[(at, view if in_rows(view) else next(gathered)) for at, view in pieces] for pieces in moves]
        rows = np.array([(*entry, 0) for entry in entries(placed)], np.int64).reshape(-1, _FIELDS)
        tiles = -(-rows[:, 2] // _TILE)
        rows[:, 7] = np.cumsum(tiles) - tiles
        device = moves[0][0][1].device
        self._entries = torch.from_numpy(np.repeat(np.arange(len(rows), dtype=np.int32), tiles)).to(device)
        self._table = torch.from_numpy(rows).to(device)
        self._sums = torch.zeros(len(moves), 2, dtype=torch.int64, device=device)
        self._columns, self._weight, self._upper = columns, weight, upper
        self._programs = PROGRAMS_ALONE if alone else PROGRAMS

    def launch(self) -> torch.Tensor:
        """Computes the sums on the current stream and returns them, `[moves, 2]` int64; the same tensor each time."""
        if self._scattered:
            with torch.inference_mode():  # vLLM's parameters may be inference tensors
                torch._foreach_copy_(self._gathered, self._scattered)
        self._sums.zero_()
        tiles = len(self._entries)
        _add_sums[(min(self._programs, tiles),)](
            self._table,
            self._entries,
            self._sums,
            tiles,
            FIELDS=_FIELDS,
            TILE=_TILE,
            WORD=WORD,
            COLUMNS=self._columns,
            WEIGHT=self._weight,
            UPPER=self._upper,
            num_warps=_WARPS,
        )
        return self._sums


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_sums(  # type: ignore[no-untyped-def]
    table,
    entries,
    sums,
    tiles,
    FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    WORD: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHT: tl.constexpr,
    UPPER: tl.constexpr,
):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        entry = table + tl.load(entries + tile).to(tl.int64) * FIELDS
        address, stride, offset = tl.load(entry), tl.load(entry + 3), tl.load(entry + 5)
        units, total = tl.load(entry + 1).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        unit = (tile - tl.load(entry + 7).to(tl.int32)) * TILE + tl.arange(0, TILE)
        row = unit // units
        column = unit - row * units
        inside = unit < total
        if tl.load(entry + 4) == WORD:
            value = tl.load(address.to(tl.pointer_type(tl.int64)) + row * (stride // 8) + column, mask=inside, other=0)
            word = offset // 8 + unit
        else:
            byte = tl.load(address.to(tl.pointer_type(tl.uint8)) + row * stride + column, mask=inside, other=0)
            place = offset + unit
            value = byte.to(tl.int64) << (8 * (place % 8))
            word = place // 8
        weight = 2 * (word // COLUMNS) + 1 + (2 * (word % COLUMNS) + 1) * WEIGHT
        of_move = sums + tl.load(entry + 6) * 2
        tl.atomic_add(of_move, tl.sum(value, axis=0))
        tl.atomic_add(of_move + 1, tl.sum((value + UPPER * (value >> 32)) * weight, axis=0))
