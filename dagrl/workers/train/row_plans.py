"""Plans the rows of microbatches: which sequences of a batch go together, equally many microbatches on every worker.

Rows are taken as they are, equally many per microbatch, or packed: many sequences in one row, where sequences with a common
prefix (`dagrl.workers.train.prefixes`) can share its tokens. Imported only where torch is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from dagrl.config import PolicyConfig
from dagrl.config.settings import least_shared
from dagrl.runtime.layout import Coordinates, ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.workers.train.packing import fitting_width, pack, pack_widths, spread
from dagrl.workers.train.prefixes import PrefixGroup, divided, prefix_groups
from dagrl.workers.train.segments import Indices

TAIL = 64  # tokens of one padding sequence: short ones cost attention little


@dataclass(frozen=True)
class SplitRule:
    """How a batch is split into microbatches: of up to `rows` rows, or up to `tokens` tokens.

    Packed rows share prefixes if that saves at least the part `least_shared` of the batch's tokens; None: never.
    """

    packed: bool
    rows: int
    tokens: int
    least_shared: float | None = None

    @staticmethod
    def of(policy: PolicyConfig, purpose: Literal["train", "logprob"]) -> SplitRule:
        """Reads the rule for training or for log-probabilities."""
        rows = policy.train_micro_batch_size if purpose == "train" else policy.logprob_batch_size
        tokens, shared = policy.microbatch_tokens(purpose), least_shared(policy)
        return SplitRule(policy.sequence_packing.enabled, rows, tokens, shared)

    def shares(self, layout: ParallelLayout) -> bool:
        """Whether rows may share prefixes. Context parallelism splits every sequence."""
        return self.packed and self.least_shared is not None and layout.cp == 1


@dataclass(frozen=True)
class ParallelRank:
    """A worker's coordinates, device, and its context-parallel and data-parallel process groups."""

    layout: ParallelLayout
    at: Coordinates
    context_group: Any
    data_group: Any
    device: torch.device


class Piece(NamedTuple):
    """A run of tokens of a sequence in a row of a microbatch: of row `row` in the batch (-1: padding), from `start` on.

    `tokens` is the padded length. With `start` above 0, the tokens before it are those of the last piece with `start` 0.
    """

    row: int
    start: int
    tokens: int


PlannedRow = Sequence[Piece]


def plan_rows(batch: Batch, rule: SplitRule, rank: ParallelRank) -> list[list[PlannedRow]]:
    """Returns the rows of each microbatch. Rows of one microbatch have equal width. A collective over dp."""
    lengths = batch["lengths"].astype(np.int64)
    if rule.packed:
        return _packed(batch, lengths, rule, rank)
    whole = _round_up(-(-batch.rows // rule.rows), _rounds(rank.layout))
    size = -(-batch.rows // whole)  # at most `rule.rows`, with minimal padding
    present = 1 + int(np.flatnonzero(lengths).max(initial=0))  # padding rows come last
    count = _round_up(_max_over_dp(-(-present // size), rank), _rounds(rank.layout))
    width = _round_up(batch.tokens, _width_multiple(rank.layout))
    rows = [*range(present), *[-1] * (count * size - present)]
    return [[[Piece(row, 0, width)] for row in rows[start : start + size]] for start in range(0, len(rows), size)]


def _packed(batch: Batch, lengths: Indices, rule: SplitRule, rank: ParallelRank) -> list[list[PlannedRow]]:
    """Packs sequences into one row per microbatch, all of one width on every data-parallel worker."""
    each, budget = _sequence_multiple(rank.layout), _budget(rule, rank.layout)
    least = rule.least_shared if rule.shares(rank.layout) else None
    groups = prefix_groups(batch, least)
    units = list(divided(groups, lengths, budget))
    sizes = [sum(piece.tokens for piece in _pieces([unit], lengths, each)) for _, unit in units]
    bins = pack(sizes, budget)
    count = _round_up(_max_over_dp(len(bins), rank), _rounds(rank.layout))
    bins = spread(sizes, bins, count, budget)
    rows = [_pieces(_joined(units[index] for index in held), lengths, each) for held in bins]
    tokens = max(sum(piece.tokens for piece in row) for row in rows)
    width = fitting_width(_max_over_dp(tokens, rank), row_widths(rule, rank.layout))
    return [[_filled_row(row, width, each)] for row in rows]


def _joined(units: Iterable[tuple[int, PrefixGroup]]) -> list[PrefixGroup]:
    """Joins parts of one group."""
    groups: dict[int, PrefixGroup] = {}
    for number, unit in units:
        before = groups[number].rows if number in groups else ()
        groups[number] = PrefixGroup((*before, *unit.rows), unit.shared)
    return list(groups.values())


def _pieces(groups: Iterable[PrefixGroup], lengths: Indices, each: int) -> list[Piece]:
    """Returns a row with these groups: a prefix, and what follows it in each sequence. Lengths are multiples of `each`."""
    pieces: list[Piece] = []
    for rows, shared in ((group.rows, group.shared if group.saved else 0) for group in groups):
        if shared:
            pieces.append(Piece(rows[0], 0, shared))
        pieces += [Piece(row, shared, _round_up(int(lengths[row]) - shared, each)) for row in rows]
    return pieces


def _filled_row(row: list[Piece], width: int, each: int) -> PlannedRow:
    left = width - sum(piece.tokens for piece in row)
    most = _round_up(TAIL, each)
    return [*row, *(Piece(-1, 0, min(most, left - start)) for start in range(0, left, most))]


def _max_over_dp(number: int, rank: ParallelRank) -> int:
    """Returns the maximum of `number` over the data-parallel workers, at least 1."""
    if rank.layout.dp == 1:
        return max(number, 1)
    shared = torch.tensor(max(number, 1), device=rank.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=rank.data_group)
    return int(shared)


def row_widths(rule: SplitRule, layout: ParallelLayout) -> tuple[int, ...]:
    """Returns the widths that packed rows are padded to, ascending."""
    return pack_widths(_budget(rule, layout), _width_multiple(layout))


def _budget(rule: SplitRule, layout: ParallelLayout) -> int:
    return _round_up(rule.tokens, _width_multiple(layout))


def _rounds(layout: ParallelLayout) -> int:
    """Returns the multiple that an interleaved schedule requires for the number of microbatches."""
    return layout.pp if layout.vpp > 1 else 1


def warmup_count(layout: ParallelLayout) -> int:
    """Returns how many microbatches suffice to reach all that a schedule does with any number, and the memory it needs.

    Before its first backward pass the first stage runs `pp - 1` forward passes, or, interleaved, `2 (pp - 1) + (vpp - 1) pp`
    over chunks. With two more or further ones it also alternates between forward and backward passes, and holds the most
    activations. Gradients are reduced with the last microbatch.
    """
    return _round_up(layout.pp + 2, _rounds(layout))


def _sequence_multiple(layout: ParallelLayout) -> int:
    """Context parallelism splits each sequence into 2 x cp chunks."""
    return 2 * layout.cp if layout.cp > 1 else 1


def _width_multiple(layout: ParallelLayout) -> int:
    """Returns the multiple for row widths: sequences split over cp, then over tp under sequence parallelism."""
    return _sequence_multiple(layout) * layout.tp


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
