"""Many copies at once: all slices of a bucket in one launch, whatever their shapes.

On GPUs `copy_kernel.py` copies from a table of rows; what it cannot do (casts, and views whose rows are not in one piece,
such as transposed ones) is left to `torch._foreach_copy_`, which also does everything on CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from dagrl.refit.copy_kernel import CopyTable

MOST_RUNS = 4096
"""A pair of views that would need more entries of the table than this is left to torch."""


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows of `nbytes` bytes each, from address `source` to address `target`; strides in bytes."""

    target: int
    source: int
    count: int
    nbytes: int
    target_stride: int
    source_stride: int


class BatchedCopy:
    """Copies `sources[i]` into `targets[i]` again and again; shapes are equal, memory is bound once and must stay."""

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        pairs = list(zip(targets, sources, strict=True))
        rows = [as_rows(*pair) if pair[0].is_cuda else None for pair in pairs]
        self._others = [pair for pair, some in zip(pairs, rows, strict=True) if some is None]
        self._kept = [pair for pair, some in zip(pairs, rows, strict=True) if some is not None]  # the table has addresses
        self._table = _table([one for some in rows if some for one in some], targets)

    def run(self, alone: bool = False) -> None:
        """Copy everything, on the current stream; `alone` takes the whole GPU instead of leaving most of it to others."""
        import torch

        if self._table is not None:
            self._table.launch(alone)
        if self._others:
            with torch.inference_mode():  # vLLM's parameters may be inference tensors
                torch._foreach_copy_([target for target, _ in self._others], [source for _, source in self._others])


def _table(rows: Sequence[Rows], targets: Sequence[Tensor]) -> CopyTable | None:
    if not rows:
        return None
    from dagrl.refit.copy_kernel import CopyTable

    return CopyTable(rows, targets[0].device)


def as_rows(target: Tensor, source: Tensor) -> list[Rows] | None:
    """The copy as rows that lie in one piece on both sides; None where it is not one of bytes, or of too many pieces."""
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
        Rows(at + to * item, of + start * item, rows, width * item, row_target * item, row_source * item)
        for to, start in _offsets(outer)
    ]


def _merged(target: Tensor, source: Tensor) -> list[tuple[int, int, int]]:
    """`(size, target stride, source stride)` of each dimension, those merged that both sides have in one piece."""
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
    """Offsets in target and source of every index of `dims`."""
    for index in product(*(range(size) for size, _, _ in dims)):
        yield (
            sum(i * to for i, (_, to, _) in zip(index, dims, strict=True)),
            sum(i * of for i, (_, _, of) in zip(index, dims, strict=True)),
        )
