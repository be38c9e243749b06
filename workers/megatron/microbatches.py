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
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

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
    cuts = [_Cut.of(rows, place) for rows in _arrange(batch, lengths, rule, place)]
    sequences = np.array([sequence for cut in cuts for sequence in cut.sequences], np.int64).T
    names = [name for name in batch.fields if name != "lengths"]
    whole, own, *columns = upload([sequences, lengths, *(batch[name] for name in names)], place.device)
    size = sum(rows * width for rows, width in (cut.shape for cut in cuts))
    table = _table(whole, own, size, batch, place)
    items = _microbatches(cuts, table, dict(zip(names, columns, strict=True)), own, vocabulary)
    filled = float(lengths.sum()) / place.layout.cp
    rows, width = cuts[0].shape
    shape = (rows, width * place.layout.cp)
    return Microbatches(items, batch.rows, batch.tokens, shape, filled, float(size), place)


def warmup_batches(batch: Batch, rule: CutRule, place: Place, seen: set[int]) -> Iterator[Batch]:
    """The batch, and where microbatches are packed before it one more for each width that they may be padded to.

    `seen`: widths that the phase has run at, in larger buckets; those that it runs at now are added. The largest is first,
    so that memory that Megatron keeps for one shape is large enough for the next.
    """
    for width in reversed(_widths(rule, place.layout)) if rule.kind == "packed" else ():
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
class _Cut:
    """A microbatch to be: its sequences, row after row; its shape [b, s] and segments after the cut over cp workers."""

    sequences: Row
    shape: tuple[int, int]
    segments: Segments | None

    @staticmethod
    def of(rows: list[Row], place: Place) -> _Cut:
        """The microbatch of these rows, which are equally wide, on this worker."""
        size, rank = place.layout.cp, place.at.cp
        plain = size == 1 and all(len(row) == 1 for row in rows)
        segments = None if plain else make_segments([[room for _, room in row] for row in rows], size, rank, place.device)
        width = sum(room for _, room in rows[0]) // size
        return _Cut([sequence for row in rows for sequence in row], (len(rows), width), segments)


@dataclass(frozen=True)
class _Table:
    """Where the tokens of all microbatches, one after the other, are in the batch, read row after row; all [n], int64.

    `sources` and those after them, `nowhere` for none; each token's row in the batch, or the number of its rows, and its
    position in its sequence. It is computed where the model is: on a processor it takes longer than all else before a
    step's first kernel.
    """

    sources: Tensor
    following: Tensor
    rows: Tensor
    positions: Tensor
    nowhere: int


def _table(sequences: Tensor, lengths: Tensor, size: int, batch: Batch, place: Place) -> _Table:
    """Of `sequences` [2, m], the position of each one's row in the batch (-1: padding) and its room; `size` tokens here."""
    numbers, rooms = sequences
    held = rooms // place.layout.cp  # of a sequence's tokens on this worker
    owners = torch.repeat_interleave(held, output_size=size)
    positions = torch.arange(size, device=held.device) - (held.cumsum(0) - held)[owners]
    positions = zigzag(positions, held[owners], place.layout.cp, place.at.cp)
    ends = torch.where(numbers < 0, 0, lengths[numbers])[owners]
    nowhere, sources = batch.rows * batch.tokens, positions + (numbers * batch.tokens)[owners]
    return _Table(
        sources=torch.where(positions < ends, sources, nowhere),
        following=torch.where(positions < ends - 1, sources + 1, nowhere),
        rows=torch.where(numbers < 0, batch.rows, numbers)[owners],
        positions=positions,
        nowhere=nowhere,
    )


def _microbatches(
    cuts: Sequence[_Cut], table: _Table, fields: Mapping[str, Tensor], lengths: Tensor, vocabulary: int | None
) -> tuple[Microbatch, ...]:
    """Every field is taken for all microbatches at once."""
    by_token = {name: field for name, field in fields.items() if field.ndim == 2}
    by_row = {name: field for name, field in fields.items() if field.ndim == 1}
    if "loss_mask" in by_token:
        by_row |= {name: sums.flatten() for name, sums in row_sums({k: v[:, 1:] for k, v in by_token.items()}).items()}
    data = {name: _taken(field, table.following) for name, field in by_token.items()}
    data |= {name: _taken(field, table.rows) for name, field in by_row.items()}
    labels, tokens = data.pop("tokens"), _taken(by_token["tokens"], table.sources)
    if vocabulary is not None:
        tokens = _filled(tokens, by_token["tokens"], table, lengths, vocabulary)
    sizes = [rows * width for rows, width in (cut.shape for cut in cuts)]
    columns = [torch.split(one, sizes) for one in (tokens, labels, table.positions, table.following, *data.values())]
    return tuple(
        _microbatch([column[number].view(cut.shape) for column in columns], list(data), cut.segments)
        for number, cut in enumerate(cuts)
    )


def _taken(field: Tensor, index: Tensor) -> Tensor:
    """Of a field, read row after row, the entries of `index`; just past its end is nowhere, where all is 0."""
    return pad(field.flatten(), (0, 1)).index_select(0, index)


def _filled(taken: Tensor, tokens: Tensor, table: _Table, lengths: Tensor, vocabulary: int) -> Tensor:
    """`taken` with the batch's own tokens, one after the other, again and again, where there are none."""
    padding = table.sources == table.nowhere
    order = padding.cumsum(0) - 1
    ends = lengths.cumsum(0)
    number = order.remainder(ends[-1].clamp(min=1))
    row = torch.searchsorted(ends, number, right=True).clamp(max=len(lengths) - 1)
    column = number - (ends - lengths)[row]
    own = tokens.flatten().index_select(0, (row * tokens.shape[1] + column).clamp(max=tokens.numel() - 1))
    return torch.where(padding, torch.where(ends[-1] > 0, own, order.remainder(vocabulary).to(own.dtype)), taken)


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
