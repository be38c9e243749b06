"""Triton kernel that packs and unpacks: any number of strided copies, or casts to bfloat16, in one launch.

A few programs work through the table, so that the rest of the GPU is free for the channel's kernels, which send a bucket
while another is packed. Import this module only on machines with a GPU: Triton comes with torch's CUDA builds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from dagrl.refit.kernels.rows import MOST_UNITS, WIDE, StridedRows

_FIELDS = 8
"""Of an entry: target, source, units per row, units of all rows, both strides in bytes, first tile, bytes per unit."""
_TILE, _CAST_TILE = 4096, 1024  # units; one of a cast is eight numbers
_WARPS = 16
PROGRAMS, PROGRAMS_ALONE = 16, 264
"""Programs while messages are sent, and without messages. 16 copy twice as fast as a link; more slow messages down."""


class CopyTable:
    """All copies of `rows`, on `device`. Either all of them cast or none."""

    def __init__(self, rows: Sequence[StridedRows], device: torch.device) -> None:
        self._casts = any(row.casts for row in rows)
        self._tile = _CAST_TILE if self._casts else _TILE
        entries = np.array([_entry(row) for row in rows], np.int64).reshape(-1, _FIELDS)
        tiles = -(-entries[:, 3] // self._tile)
        entries[:, 6] = np.cumsum(tiles) - tiles
        owners = np.repeat(np.arange(len(entries), dtype=np.int32), tiles)
        self._tiles = len(owners)
        self._table = torch.from_numpy(entries).to(device)
        self._owners = torch.from_numpy(owners).to(device)

    def launch(self, alone: bool) -> None:
        """Copies everything, on the current stream."""
        constants = {"FIELDS": _FIELDS, "TILE": self._tile, "WIDE": WIDE, "CASTS": self._casts}
        programs = PROGRAMS_ALONE if alone else PROGRAMS * (4 if self._casts else 1)  # tiles of casts write a quarter
        _copy_rows[(min(programs, self._tiles),)](self._table, self._owners, self._tiles, **constants, num_warps=_WARPS)


def _entry(rows: StridedRows) -> tuple[int, ...]:
    """Returns the table entry of some rows."""
    strides = (rows.target_stride, rows.source_stride) if rows.count > 1 else (0, 0)
    unit = WIDE if rows.wide else 1
    units = rows.nbytes // unit
    assert units * rows.count <= MOST_UNITS, "a move has at most the bytes of a bucket's staging memory"
    return (rows.target, rows.source, units, units * rows.count, *strides, 0, unit)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _copy_rows(  # type: ignore[no-untyped-def]
    table, owners, tiles, FIELDS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, CASTS: tl.constexpr
):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        entry = table + tl.load(owners + tile).to(tl.int64) * FIELDS
        target, source = tl.load(entry), tl.load(entry + 1)
        units, total = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
        target_stride, source_stride = tl.load(entry + 4), tl.load(entry + 5)
        unit = (tile - tl.load(entry + 6).to(tl.int32)) * TILE + tl.arange(0, TILE)
        row = unit // units
        column = unit - row * units
        inside = unit < total
        if CASTS:  # eight numbers of float32
            items = tl.arange(0, 8)[None, :]
            halves = tl.multiple_of(target.to(tl.pointer_type(tl.bfloat16)), 16)
            singles = tl.multiple_of(source.to(tl.pointer_type(tl.float32)), 16)
            to_item = tl.multiple_of(row * (target_stride // 2) + column.to(tl.int64) * 8, 8)
            of_item = tl.multiple_of(row * (source_stride // 4) + column.to(tl.int64) * 8, 4)
            single = tl.load(singles + of_item[:, None] + items, mask=inside[:, None], cache_modifier=".cg")
            tl.store(halves + to_item[:, None] + items, single.to(tl.bfloat16), mask=inside[:, None])
        elif tl.load(entry + 7) == WIDE:
            # Pairs of 8-byte words: strides and addresses are multiples of 16, so a pair is one access.
            words = tl.arange(0, 2)[None, :]
            to = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
            of = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
            to_word = tl.multiple_of(row * (target_stride // 8) + column.to(tl.int64) * 2, 2)
            of_word = tl.multiple_of(row * (source_stride // 8) + column.to(tl.int64) * 2, 2)
            value = tl.load(of + of_word[:, None] + words, mask=inside[:, None], cache_modifier=".cg")
            tl.store(to + to_word[:, None] + words, value, mask=inside[:, None])
        else:
            to_byte = target.to(tl.pointer_type(tl.uint8)) + row * target_stride + column
            of_byte = source.to(tl.pointer_type(tl.uint8)) + row * source_stride + column
            tl.store(to_byte, tl.load(of_byte, mask=inside), mask=inside)
