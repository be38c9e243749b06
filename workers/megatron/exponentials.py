"""Exponentials of a microbatch's logits in half precision, which the output layer keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

PRODUCT_ELEMENTS = (1 << 31) - 1  # most of a product's operand: kernels may count elements in 32 bits
TILE = 4096  # columns that the kernel reads at a time


@dataclass(frozen=True)
class Exponentials:
    """Exponentials of logits, relative to a number close to the highest of their row: exp(logit - top).

    `values` [n, shard.size] have the dtype of the hidden states; `tops` [n, tiles] are float32, one for each tile of columns
    that the kernel reads at a time. Without the kernel a row is one tile.
    """

    values: Tensor
    tops: Tensor

    @classmethod
    def of(cls, hidden: Tensor, columns: int) -> Exponentials:
        """Allocates memory for `hidden` [n, hidden size]."""
        tiles = -(-columns // TILE) if hidden.is_cuda else 1
        values = hidden.new_empty(len(hidden), columns)
        return cls(values, hidden.new_empty(len(hidden), tiles, dtype=torch.float32))

    def __getitem__(self, rows: slice) -> Exponentials:
        return Exponentials(self.values[rows], self.tops[rows])

    def parts(self) -> Iterator[slice]:
        """Yields slices of the tokens, as large as products take."""
        tokens, columns = self.values.shape
        step = max(1, PRODUCT_ELEMENTS // max(1, columns))
        return (slice(start, start + step) for start in range(0, tokens if columns else 0, step))
