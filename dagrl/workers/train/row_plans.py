"""Plans the rows of microbatches: which sequences of a batch go together, equally many microbatches on every worker.

Rows are taken as they are, equally many per microbatch, or packed: many sequences in one row of at most a number of tokens,
padded to one of a few widths, so that kernels see known shapes. Packed sequences that begin with the same tokens can share
these: the samples of a prompt, or the two answers of a preference. Imported only where torch is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dagrl.config import PolicyConfig
from dagrl.config.settings import least_shared
from dagrl.data.media import MEDIA, ids_in
from dagrl.errors import DataError
from dagrl.runtime.layout import Coordinates, ParallelLayout
from dagrl.runtime.shapes import Batch

TAIL = 64  # tokens of one padding sequence: short ones cost attention little
WIDTHS = 8  # number of widths of packed microbatches: eighths of the budget
MOST_LEVELS = 64  # of groups within groups that are tried

Indices = npt.NDArray[np.int64]

Bins = list[list[int]]  # microbatches, each a list of ascending sequence indices


@dataclass(frozen=True)
class SplitRule:
    """How a batch is split into microbatches: of up to `rows` rows, or up to `tokens` tokens.

    Packed rows share prefixes if that saves at least the part `least_shared` of the batch's tokens; None: never. Context
    parallelism splits each sequence in two chunks per worker (`zigzag`), or, with `by_row`, each row in one.
    """

    packed: bool
    rows: int
    tokens: int
    least_shared: float | None = None
    by_row: bool = False

    @staticmethod
    def of(policy: PolicyConfig, purpose: Literal["train", "logprob"], *, shares: bool = True) -> SplitRule:
        """Reads the rule for training or for log-probabilities, of a model that `shares` prefixes or not."""
        rows = policy.train_micro_batch_size if purpose == "train" else policy.logprob_batch_size
        tokens, shared = policy.microbatch_tokens(purpose), least_shared(policy) if shares else None
        return SplitRule(policy.sequence_packing.enabled, rows, tokens, shared, by_row=policy.backend == "fsdp")

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
    width = _round_up(batch.tokens, _width_multiple(rule, rank.layout))
    rows = [*range(present), *[-1] * (count * size - present)]
    return [[[Piece(row, 0, width)] for row in rows[start : start + size]] for start in range(0, len(rows), size)]


def _packed(batch: Batch, lengths: Indices, rule: SplitRule, rank: ParallelRank) -> list[list[PlannedRow]]:
    """Packs sequences into one row per microbatch, all of one width on every data-parallel worker."""
    each, budget = _sequence_multiple(rule, rank.layout), _budget(rule, rank.layout)
    least = rule.least_shared if rule.shares(rank.layout) else None
    groups = prefix_groups(batch, least)
    if MEDIA in batch.fields and not any(group.saved for group in groups):
        groups = image_groups(batch)
    units = list(divided(groups, lengths, budget))
    sizes = [sum(piece.tokens for piece in _pieces([unit], lengths, each)) for _, unit in units]
    bins = pack(sizes, budget)
    count = _round_up(_max_over_dp(len(bins), rank), _rounds(rank.layout))
    bins = spread(sizes, bins, count, budget)
    rows = [_pieces(_joined(units[index] for index in held), lengths, each) for held in bins]
    tokens = _max_over_dp(max(sum(piece.tokens for piece in row) for row in rows), rank)
    width = next(width for width in row_widths(rule, rank.layout) if width >= tokens)
    longest = _round_up(TAIL, each)
    for row in rows:
        left = width - sum(piece.tokens for piece in row)
        row += [Piece(-1, 0, min(longest, left - start)) for start in range(0, left, longest)]
    return [[row] for row in rows]


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


def _max_over_dp(number: int, rank: ParallelRank) -> int:
    """Returns the maximum of `number` over the data-parallel workers, at least 1."""
    if rank.layout.dp == 1:
        return max(number, 1)
    shared = torch.tensor(max(number, 1), device=rank.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=rank.data_group)
    return int(shared)


def row_widths(rule: SplitRule, layout: ParallelLayout) -> tuple[int, ...]:
    """Returns the widths that packed rows are padded to, ascending: eighths of the budget, rounded up."""
    budget, multiple = _budget(rule, layout), _width_multiple(rule, layout)
    return tuple(sorted({_round_up(-(-budget * part // WIDTHS), multiple) for part in range(1, WIDTHS + 1)}))


def _budget(rule: SplitRule, layout: ParallelLayout) -> int:
    return _round_up(rule.tokens, _width_multiple(rule, layout))


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


def _sequence_multiple(rule: SplitRule, layout: ParallelLayout) -> int:
    """Returns the multiple for sequence lengths: context parallelism splits each into 2 x cp chunks, or rows."""
    return 2 * layout.cp if layout.cp > 1 and not rule.by_row else 1


def _width_multiple(rule: SplitRule, layout: ParallelLayout) -> int:
    """Returns the multiple for row widths: rows or sequences split over cp, then over tp under sequence parallelism."""
    return (layout.cp if rule.by_row else _sequence_multiple(rule, layout)) * layout.tp


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def pack(lengths: Sequence[int], budget: int) -> Bins:
    """Packs every sequence into microbatches of at most `budget` tokens: first fit, the longest sequence first.

    Raises DataError if a sequence is longer.
    """
    if len(lengths) and max(lengths) > budget:
        raise DataError(
            f"a sequence of {max(lengths)} tokens does not fit a microbatch of {budget}; raise "
            "policy.sequence_packing.train_mb_tokens and logprob_mb_tokens, or shorten the data"
        )
    bins: Bins = []
    room = np.zeros(len(lengths), np.int64)
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        fits = np.flatnonzero(room[: len(bins)] >= lengths[row])
        if len(fits):
            index = int(fits[0])
        else:
            index = len(bins)
            bins.append([])
            room[index] = budget
        bins[index].append(row)
        room[index] -= lengths[row]
    return [sorted(rows) for rows in bins]


def spread(lengths: Sequence[int], bins: Bins, count: int, budget: int) -> Bins:
    """Distributes the sequences of `bins` evenly over `count` >= len(bins) microbatches.

    Assigns the longest first to the microbatch with the fewest tokens. If that is worse, returns `bins` with empty ones.
    """
    rows = sorted((row for held in bins for row in held), key=lambda row: -lengths[row])
    heap = [(0, index) for index in range(count)]
    even: Bins = [[] for _ in range(count)]
    for row in rows:
        tokens, index = heapq.heappop(heap)
        even[index].append(row)
        heapq.heappush(heap, (tokens + lengths[row], index))
    kept = [*bins, *([] for _ in range(count - len(bins)))]
    better = max(tokens for tokens, _ in heap) <= min(budget, largest(lengths, kept))
    return [sorted(held) for held in (even if better else kept)]


def largest(lengths: Sequence[int], bins: Bins) -> int:
    """Returns the tokens of the largest microbatch."""
    return max((sum(lengths[row] for row in rows) for rows in bins), default=0)


@dataclass(frozen=True)
class PrefixGroup:
    """Rows of a batch whose first `shared` tokens are computed once."""

    rows: tuple[int, ...]
    shared: int

    @property
    def saved(self) -> int:
        """Number of tokens that are not computed again."""
        return (len(self.rows) - 1) * self.shared


def prefix_groups(batch: Batch, least: float | None) -> list[PrefixGroup]:
    """Returns the groups that save the most tokens. Each row with tokens is in one, possibly alone.

    If they save less than `least` of the batch's tokens, or with None, every row is alone. Only neighbours are compared, as
    rows of a prompt follow each other in every batch. The last token that all rows of a group have in common is not shared.
    Its hidden state predicts the first token that differs, and each hidden state has one label. Tokens whose labels are in
    the loss are not shared either.
    """
    rows = np.flatnonzero(batch["lengths"])
    alone = [PrefixGroup((row,), 0) for row in rows.tolist()]
    if least is None:
        return alone
    runs = _best(_common_tokens(batch, rows).tolist(), 0, len(rows), 0)[1]
    groups = [PrefixGroup(tuple(rows[start:stop].tolist()), shared) for start, stop, shared in runs]
    return groups if sum(group.saved for group in groups) >= least * batch["lengths"].sum() else alone


def image_groups(batch: Batch) -> list[PrefixGroup]:
    """Returns groups of neighbours with equal images, which a microbatch computes once, without shared prefixes."""
    rows = np.flatnonzero(batch["lengths"]).tolist()
    keys = [tuple(ids_in(batch[MEDIA][row])) or (-1, row) for row in rows]  # rows without images are alone
    runs = groupby(zip(keys, rows, strict=True), key=itemgetter(0))
    return [PrefixGroup(tuple(row for _, row in run), 0) for _, run in runs]


def divided(groups: Sequence[PrefixGroup], lengths: npt.NDArray[np.int64], budget: int) -> Iterator[tuple[int, PrefixGroup]]:
    """Yields parts of the groups that fit `budget` tokens, each with the number of its group.

    Parts have up to half the budget, so that microbatches can be filled evenly; up to all of it if the prefix is long, or if
    half has no room for two rows of average length.
    """
    for number, group in enumerate(groups):
        two = 2 * int(lengths[[*group.rows]].mean()) - group.shared
        limit = budget // 2 if 4 * group.shared <= budget and 2 * two <= budget else budget
        part, tokens = list[int](), group.shared
        for row in group.rows:
            own = int(lengths[row]) - group.shared
            if part and tokens + own > limit:
                yield number, PrefixGroup(tuple(part), group.shared)
                part, tokens = [], group.shared
            part.append(row)
            tokens += own
        yield number, PrefixGroup(tuple(part), group.shared)


def _common_tokens(batch: Batch, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """Returns how many tokens each of these rows can share with the next one, [rows - 1]."""
    ends, places = batch["lengths"] - 1, np.arange(batch.tokens)
    if "loss_mask" in batch.fields:
        scored = (batch["loss_mask"] != 0) & (places > 0) & (places <= ends[:, None])
        ends = np.where(scored.any(1), scored.argmax(1) - 1, ends)
    ends = ends[rows]
    tokens = batch["tokens"][:, : ends.max(initial=0) + 2][rows]
    equal = tokens[1:] == tokens[:-1]
    if MEDIA in batch.fields:  # images of one size have equal tokens
        media = batch[MEDIA][:, : tokens.shape[1]][rows]
        equal &= media[1:] == media[:-1]
    equal = np.pad(equal, ((0, 0), (0, 1)))
    common: npt.NDArray[np.int64] = np.minimum(np.minimum(ends[1:], ends[:-1]), np.maximum(equal.argmin(1) - 1, 0))
    if MEDIA in batch.fields and len(common):  # no prefix ends inside of an image, whose parts may have text in between
        media, width = batch[MEDIA][rows[:-1]], batch.tokens
        following = np.minimum.accumulate(np.where(media == 0, width, np.arange(width))[:, ::-1], 1)[:, ::-1]
        inside = np.take_along_axis(np.pad(media, ((0, 0), (0, 1))), following, 1) > 0
        common = np.maximum.accumulate(np.where(inside, 0, np.arange(width)), 1)[np.arange(len(common)), common]
    return common


Runs = list[tuple[int, int, int]]  # runs of rows: first, end, and the number of tokens that they share


def _best(common: Sequence[int], start: int, stop: int, level: int) -> tuple[int, Runs]:
    """Returns the runs of the rows `start` to `stop` that save the most tokens, and how many they save.

    They are one run, or separated where neighbours have the least in common.
    """
    if stop - start < 2:
        return 0, [(start, stop, 0)][: stop - start]
    between = common[start : stop - 1]
    least = min(between)
    saved = (stop - start - 1) * least
    if level == MOST_LEVELS:
        return saved, [(start, stop, least)]
    cuts = [start, *(start + 1 + place for place, tokens in enumerate(between) if tokens == least), stop]
    parts = [_best(common, first, end, level + 1) for first, end in pairwise(cuts)]
    apart = sum(part for part, _ in parts)
    if saved > apart:
        return saved, [(start, stop, least)]
    return apart, [run for _, runs in parts for run in runs]
