"""Cuts a padded batch into microbatches for one context-parallel worker, and puts the results together again.

Three ways (`CutRule`): rows as they are, equally many in each; rows of like length together, padded to the longest of them;
or packed, one row of many sequences each. Whichever it is, a microbatch is a table that says where in the batch each of
its tokens comes from, and every field is taken by that table.

Megatron predicts the next token: position `t` of the model's output is about token `t + 1`. The batch is token aligned
(`dagrl.shapes`), so labels and token fields are shifted by one on the way in, and results are shifted back on the way out.
Imported only where torch is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from dagrl.config import PolicyConfig
from dagrl.layout import Coordinates, ParallelLayout
from dagrl.losses import row_sums
from dagrl.packing import Bins, by_length, fitting_width, largest, pack, pack_widths, spread
from dagrl.shapes import Batch
from workers.megatron.segments import Indices, Segments, make_segments, zigzag
from workers.megatron.upload import upload

TAIL = 64  # padding behind packed sequences is cut in sequences of about so many tokens, which cost attention little


@dataclass(frozen=True)
class CutRule:
    """How a batch becomes microbatches: of up to `rows` rows, or up to `tokens` tokens, as `policy` says."""

    kind: Literal["rows", "packed", "dynamic"]
    rows: int
    tokens: int
    algorithm: str
    round_to: int

    @staticmethod
    def of(policy: PolicyConfig, purpose: Literal["train", "logprob"]) -> CutRule:
        """The rule for training, or for log-probabilities."""
        packing, dynamic = policy.sequence_packing, policy.dynamic_batching
        kind: Literal["rows", "packed", "dynamic"] = (
            "packed" if packing.enabled else "dynamic" if dynamic.enabled else "rows"
        )
        rows = policy.train_micro_batch_size if purpose == "train" else policy.logprob_batch_size
        return CutRule(kind, rows, policy.microbatch_tokens(purpose), packing.algorithm, dynamic.sequence_length_round)


@dataclass(frozen=True)
class Place:
    """A worker's place among those that cut the same batch or others beside it, with the groups of torch.distributed."""

    layout: ParallelLayout
    at: Coordinates
    context_group: Any
    data_group: Any
    device: torch.device


@dataclass(frozen=True)
class Microbatch:
    """All [b, s]: `tokens`, `labels`, `positions`, and the fields of `data`, those of whole rows repeated for each token.

    `targets` says where in the batch, read row after row, the label of each token stands; past its end: nowhere.
    `segments` is None where every row is one sequence.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    targets: Tensor
    data: Mapping[str, Tensor]
    segments: Segments | None


@dataclass(frozen=True)
class Microbatches:
    """All microbatches of a batch of `rows` x `width`; `shape` is the first one's, before context parallelism.

    `filled` of the `processed` tokens are the batch's own, as this worker's part of the sums over all workers.
    """

    items: tuple[Microbatch, ...]
    rows: int
    width: int
    shape: tuple[int, int]
    filled: float
    processed: float
    place: Place

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """Token-aligned [rows, width] from one [b, s] a microbatch; entry 0 of each row, and what is padding, is 0."""
        values = torch.cat([part.flatten() for part in parts])
        targets = torch.cat([item.targets.flatten() for item in self.items])
        whole = values.new_zeros(self.rows * self.width + 1).index_copy_(0, targets, values)
        if self.place.layout.cp > 1:
            dist.all_reduce(whole, group=self.place.context_group)  # each token's value is on one worker
        return whole[:-1].view(self.rows, self.width)


def cut_batch(batch: Batch, rule: CutRule, place: Place, vocabulary: int | None = None) -> Microbatches:
    """Microbatches of all rows but padding, as many on every worker; a collective over data-parallel workers.

    No token sees their padding, and no loss has it, but experts are computed for it too, and one id alone would send all of
    it to the same few. With a `vocabulary`, for a model with experts, the batch's own tokens are repeated in it, where there
    are none the ids of the vocabulary; without, it is of id 0.
    """
    lengths = batch["lengths"].astype(np.int64)
    tables = [_table(rows, lengths, batch.tokens, place) for rows in _arrange(batch, lengths, rule, place)]
    items = _microbatches(tables, _fields(batch, lengths, vocabulary), place)
    size = sum(item.tokens.numel() for item in items)
    filled = float(lengths.sum()) / place.layout.cp
    rows, width = tables[0].sources.shape
    shape = (rows, width * place.layout.cp)
    return Microbatches(items, batch.rows, batch.tokens, shape, filled, float(size), place)


def warmup_batches(batch: Batch, rule: CutRule, place: Place, seen: set[int]) -> Iterator[Batch]:
    """The batch, and where microbatches are packed before it one more for each width that they may be padded to.

    `seen`: widths that the phase has run at, in larger buckets; those that it runs at now are added.
    """
    for width in _widths(rule, place.layout) if rule.kind == "packed" else ():
        rows = -(-width // batch.tokens)
        if rows <= batch.rows and width not in seen:
            seen.add(width)
            lengths = np.full(rows, batch.tokens)
            lengths[-1] -= rows * batch.tokens - width
            yield batch.select(range(rows)).with_fields(lengths=lengths)
    yield batch


Row = Sequence[tuple[int, int]]
"""A row of a microbatch: the sequences in it, each the position of its row in the batch (-1: padding) and its room."""


def _arrange(batch: Batch, lengths: Indices, rule: CutRule, place: Place) -> list[list[Row]]:
    """The rows of each microbatch; those of a microbatch are equally wide."""
    if rule.kind == "packed":
        return _packed(lengths, rule, place)
    if rule.kind == "dynamic":
        return _dynamic(lengths, rule, place)
    whole = _round_up(-(-batch.rows // rule.rows), _rounds(place.layout))
    size = -(-batch.rows // whole)  # not more than the rule's, and as little padding as equal microbatches can have
    present = 1 + int(np.flatnonzero(lengths).max(initial=0))  # padding rows come last
    count = _round_up(_most(-(-present // size), place), _rounds(place.layout))
    width = _round_up(batch.tokens, _width_multiple(place.layout))
    rows = [*range(present), *[-1] * (count * size - present)]
    return [[[(row, width)] for row in rows[start : start + size]] for start in range(0, len(rows), size)]


def _packed(lengths: Indices, rule: CutRule, place: Place) -> list[list[Row]]:
    """One row each, of sequences that are side by side; all of one width, on every data-parallel worker."""
    each = _sequence_multiple(place.layout)
    present = np.flatnonzero(lengths).tolist()
    room = [_round_up(int(length), each) for length in lengths[present]]
    bins = pack(room, _budget(rule, place.layout), rule.algorithm)
    count = _round_up(_most(len(bins), place), _rounds(place.layout))
    bins = spread(room, bins, count, _budget(rule, place.layout))
    width = fitting_width(_most(largest(room, bins), place), _widths(rule, place.layout))
    return [[_filled_row([(present[index], room[index]) for index in held], width, each)] for held in bins]


def _filled_row(row: list[tuple[int, int]], width: int, each: int) -> Row:
    left = width - sum(room for _, room in row)
    piece = _round_up(TAIL, each)
    return [*row, *((-1, min(piece, left - start)) for start in range(0, left, piece))]


def _dynamic(lengths: Indices, rule: CutRule, place: Place) -> list[list[Row]]:
    """Rows of like length, padded to the longest of them."""
    present = np.flatnonzero(lengths).tolist()
    bins: Bins = by_length(lengths[present].tolist(), rule.tokens, rule.round_to)
    count = _round_up(_most(len(bins), place), _rounds(place.layout))
    rows = [[present[index] for index in held] for held in bins] + [[-1]] * (count - len(bins))
    multiple = _width_multiple(place.layout)
    widths = [
        _round_up(_round_up(max(int(lengths[row]) if row >= 0 else 1 for row in held), rule.round_to), multiple)
        for held in rows
    ]
    return [[[(row, width)] for row in held] for held, width in zip(rows, widths, strict=True)]


def _most(number: int, place: Place) -> int:
    """The largest of the numbers that the data-parallel workers have, at least 1."""
    if place.layout.dp == 1:
        return max(number, 1)
    shared = torch.tensor(max(number, 1), device=place.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=place.data_group)
    return int(shared)


@dataclass(frozen=True)
class _Table:
    """Where a microbatch's tokens are in the batch, read row after row: `sources` and those after them, -1 for nowhere.

    `rows` [b, s] is each token's row in the batch, or -1. All after the cut over context-parallel workers.
    """

    sources: Indices
    following: Indices
    rows: Indices
    positions: Indices
    segments: Segments | None


def _table(rows: list[Row], lengths: Indices, width: int, place: Place) -> _Table:
    size, rank = place.layout.cp, place.at.cp
    lines = [_line(row, lengths, width, size, rank) for row in rows]
    columns = [np.stack(column) for column in zip(*lines, strict=True)]
    plain = size == 1 and all(len(row) == 1 for row in rows)
    segments = None if plain else make_segments([[room for _, room in row] for row in rows], size, rank, place.device)
    return _Table(columns[0], columns[1], columns[2], columns[3], segments)


def _line(row: Row, lengths: Indices, width: int, size: int, rank: int) -> list[Indices]:
    """Sources, following sources, rows and positions [s] of one row of a microbatch."""
    parts = []
    for number, room in row:
        positions = zigzag(room, size, rank)
        length = int(lengths[number]) if number >= 0 else 0
        sources = np.where(positions < length, positions + number * width, -1)
        following = np.where(positions < length - 1, positions + number * width + 1, -1)
        parts.append((sources, following, np.full(len(positions), number), positions))
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


Array = npt.NDArray[Any]


@dataclass(frozen=True)
class _Fields:
    """The batch's arrays, read row after row, with an entry more that is 0: that of nowhere.

    `filler` are token ids for padding, to be repeated.
    """

    tokens: Array
    filler: Array
    by_token: Mapping[str, Array]
    by_row: Mapping[str, Array]
    nowhere: int


def _fields(batch: Batch, lengths: Indices, vocabulary: int | None) -> _Fields:
    filler = np.zeros(1, np.int64) if vocabulary is None else _own_tokens(batch, lengths, vocabulary)
    token = {name: array for name, array in batch.fields.items() if array.ndim == 2}
    row = {name: array for name, array in batch.fields.items() if array.ndim == 1 and name != "lengths"}
    if "loss_mask" in token:
        whole = {name: torch.from_numpy(array[:, 1:].copy()) for name, array in token.items()}
        row |= {name: value.flatten().numpy() for name, value in row_sums(whole).items()}
    flat = {name: np.append(array.ravel(), array.dtype.type(0)) for name, array in token.items()}
    by_row = {name: np.append(array, array.dtype.type(0)) for name, array in row.items()}
    return _Fields(flat.pop("tokens"), filler, flat, by_row, batch.rows * batch.tokens)


def _own_tokens(batch: Batch, lengths: Indices, vocabulary: int) -> Array:
    own: Array = batch["tokens"][np.arange(batch.tokens) < lengths[:, None]]
    return own if len(own) else np.arange(vocabulary)


def _microbatches(tables: Sequence[_Table], fields: _Fields, place: Place) -> tuple[Microbatch, ...]:
    """Every field is taken for all microbatches at once, and all cross to the device in one copy."""
    sources, following, rows, positions = (
        np.concatenate([getattr(table, name).ravel() for table in tables])
        for name in ("sources", "following", "rows", "positions")
    )
    targets = np.where(following < 0, fields.nowhere, following)
    data = {name: array[following] for name, array in fields.by_token.items()}
    data |= {name: array[rows] for name, array in fields.by_row.items()}
    tokens, padding = fields.tokens[sources], sources < 0
    tokens[padding] = np.resize(fields.filler, np.count_nonzero(padding))
    arrays = [tokens, fields.tokens[following], positions, targets, *data.values()]
    sizes = [table.sources.size for table in tables]
    columns = [torch.split(column, sizes) for column in upload(arrays, place.device)]
    return tuple(
        _microbatch([column[number].view(table.sources.shape) for column in columns], list(data), table.segments)
        for number, table in enumerate(tables)
    )


def _microbatch(parts: Sequence[Tensor], names: Sequence[str], segments: Segments | None) -> Microbatch:
    tokens, labels, positions, targets, *data = parts
    return Microbatch(tokens, labels, positions, targets, dict(zip(names, data, strict=True)), segments)


def _widths(rule: CutRule, layout: ParallelLayout) -> tuple[int, ...]:
    return pack_widths(_budget(rule, layout), _width_multiple(layout))


def _budget(rule: CutRule, layout: ParallelLayout) -> int:
    return _round_up(rule.tokens, _width_multiple(layout))


def _rounds(layout: ParallelLayout) -> int:
    """An interleaved schedule wants the number of microbatches to be a multiple of this."""
    return layout.pp if layout.vpp > 1 else 1


def _sequence_multiple(layout: ParallelLayout) -> int:
    """Sequences are cut in 2 x cp chunks."""
    return 2 * layout.cp if layout.cp > 1 else 1


def _width_multiple(layout: ParallelLayout) -> int:
    """Rows are cut as sequences are, and what is left by tp under sequence parallelism."""
    return _sequence_multiple(layout) * layout.tp


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
