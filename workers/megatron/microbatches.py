"""Cuts a padded batch into equal microbatches for one context-parallel worker, and puts the results together again.

Megatron predicts the next token: position `t` of the model's output is about token `t + 1`. The batch is token aligned
(`dagrl.shapes`), so labels and token fields are shifted by one on the way in, and results are shifted back on the way out.
Imported only where torch is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dagrl.layout import ParallelLayout
from dagrl.losses import row_sums
from dagrl.shapes import Batch
from workers.megatron.attention import gather_sequence, zigzag_positions


@dataclass(frozen=True)
class Microbatch:
    """`tokens`, `labels`, `positions` and the token fields of `data` are [b, s], the row fields of `data` [b]."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    data: Mapping[str, Tensor]


@dataclass(frozen=True)
class Microbatches:
    """All microbatches of a batch: `rows` x `width` is the batch's own shape, `padded_width` what the model sees."""

    items: tuple[Microbatch, ...]
    rows: int
    width: int
    padded_width: int
    micro_batch_size: int
    positions: Tensor  # [s], the positions this worker holds
    context_group: Any

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """Token-aligned [rows, width] from one [b, s] a microbatch; entry 0 of each row is 0."""
        local = torch.cat(list(parts))  # [rows, s]
        whole = local
        if self.context_group is not None:
            order = gather_sequence(self.positions.to(local.device), self.context_group)
            gathered = gather_sequence(local.T, self.context_group)  # [padded_width, rows]
            whole = torch.empty_like(gathered).index_copy_(0, order, gathered).T
        aligned = torch.zeros_like(whole)
        aligned[:, 1:] = whole[:, :-1]
        return aligned[: self.rows, : self.width]


def cut_batch(
    batch: Batch, size: int, layout: ParallelLayout, cp_rank: int, context_group: Any, device: torch.device
) -> Microbatches:
    """Microbatches of `size` rows, as many on every worker: padding rows and tokens are added, none are dropped."""
    size = min(size, batch.rows)
    multiple = size * (layout.pp if layout.vpp > 1 else 1)  # an interleaved schedule wants multiples of pp
    rows, width = _round_up(batch.rows, multiple), _round_up(batch.tokens, _width_multiple(layout))
    fields = {name: _to_tensor(array, rows, width, device) for name, array in batch.fields.items()}
    tokens, positions = fields.pop("tokens"), _positions(width, layout.cp, cp_rank).to(device)
    data = {name: field if field.ndim == 1 else _shift(field)[:, positions] for name, field in fields.items()}
    if "loss_mask" in fields:
        data |= row_sums({name: field[:, 1:] for name, field in fields.items() if field.ndim == 2})
    columns = {"tokens": tokens[:, positions], "labels": _shift(tokens)[:, positions], **data}
    items = tuple(
        _microbatch({name: column[start : start + size] for name, column in columns.items()}, positions)
        for start in range(0, rows, size)
    )
    return Microbatches(items, batch.rows, batch.tokens, width, size, positions, context_group if layout.cp > 1 else None)


def _microbatch(columns: dict[str, Tensor], positions: Tensor) -> Microbatch:
    tokens, labels = columns.pop("tokens"), columns.pop("labels")
    return Microbatch(tokens, labels, positions.expand_as(tokens), columns)


def _positions(width: int, cp: int, cp_rank: int) -> Tensor:
    return zigzag_positions(width // cp, cp, cp_rank) if cp > 1 else torch.arange(width)


def _width_multiple(layout: ParallelLayout) -> int:
    """Sequences are cut in 2 x cp chunks, and what is left by tp under sequence parallelism."""
    return (2 * layout.cp if layout.cp > 1 else 1) * layout.tp


def _to_tensor(array: Any, rows: int, width: int, device: torch.device) -> Tensor:
    """The array, copied (it may be a read-only view) and padded with zeros."""
    shape = (rows,) if array.ndim == 1 else (rows, width)
    tensor = torch.zeros(shape, dtype=torch.from_numpy(array[:0].copy()).dtype, device=device)
    tensor[tuple(slice(extent) for extent in array.shape)] = torch.tensor(array, device=device)
    return tensor


def _shift(field: Tensor) -> Tensor:
    """Entry `t` becomes that of token `t + 1`; the last is 0."""
    return torch.nn.functional.pad(field[:, 1:], (0, 1))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
