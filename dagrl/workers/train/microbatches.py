"""Splits a padded batch into microbatches for one context-parallel worker, and assembles the results.

`dagrl.workers.train.row_plans` decides which sequences go together. A table maps each token of a microbatch to its
position in the batch, and every field is gathered by that table.

Megatron predicts the next token: position `t` of the model's output belongs to token `t + 1`. The batch is token aligned
(`dagrl.runtime.shapes`), so labels and token fields are shifted by one here, and results are shifted back.

Layers need attention segments in addition to hidden states, if rows are packed or split over context-parallel workers. A
microbatch of `b` rows is flattened to `b * s` tokens. A segment is a run of queries and the keys they see. It is causal from
its end: the last query sees every key, the previous one all but the last, and so on. A packed sequence is one segment. Under
context parallelism a worker holds two chunks of every sequence (`zigzag`), which are two segments: each has the chunk's
queries and all keys up to the chunk's end, selected from the gathered keys. A worker that holds a run of each row instead
(`SplitRule.by_row`) has the segments of whole rows, for layers that gather queries too. Segments may share a prefix
(`row_plans.py`): another segment, whose keys all their queries see too. Imported only where torch is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from dagrl.data.media import MEDIA
from dagrl.rl.routed_experts import MISSING, ROUTED_EXPERTS, RoutedLayers, field_bytes
from dagrl.runtime.shapes import Batch
from dagrl.workers.train.logprobs import scored_tokens
from dagrl.workers.train.offload import ALIGNMENT
from dagrl.workers.train.row_plans import Indices, ParallelRank, PlannedRow, SplitRule, plan_rows, row_widths, warmup_count

SHORTEST_SEGMENT = 256


@dataclass(frozen=True)
class Segments:
    """`n` segments.

    `query_starts` and `key_starts` [n + 1] int32 are offsets on the device. `key_order` indexes the keys of all
    context-parallel workers, gathered in rank order; None: keys are ordered like queries.

    `heads` [n] has the index of each segment's prefix, -1 for none; empty: there are no prefixes. `prefixes` then divides
    queries and keys into segments that are not causal: the queries after a prefix see its keys, all others none.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    query_starts: Tensor
    key_starts: Tensor
    key_order: Tensor | None
    heads: tuple[int, ...] = ()
    prefixes: Segments | None = None

    @property
    def sizes(self) -> tuple[Tensor, Tensor, int, int]:
        """Offsets, and the largest numbers of queries and of keys, as kernels take them."""
        return self.query_starts, self.key_starts, self.longest_query, self.longest_key

    @property
    def rounded_sizes(self) -> tuple[Tensor, Tensor, int, int]:
        """The same with rounded numbers."""
        return self.query_starts, self.key_starts, self.rounded_query, self.rounded_key

    @property
    def longest_query(self) -> int:
        """Number of queries in the largest segment."""
        return max(self.query_lengths)

    @property
    def longest_key(self) -> int:
        """Number of keys in the largest segment."""
        return max(self.key_lengths)

    @property
    def rounded_query(self) -> int:
        """`longest_query` rounded up for CUDA graphs: segments for which it is the same share a recording."""
        return min(rounded(self.longest_query, SHORTEST_SEGMENT), sum(self.query_lengths))

    @property
    def rounded_key(self) -> int:
        """`longest_key` rounded up in the same way."""
        return min(rounded(self.longest_key, SHORTEST_SEGMENT), sum(self.key_lengths))


def rounded(number: int, least: int) -> int:
    """Returns the next power of two that is at least `least`."""
    return max(least, 1 << (number - 1).bit_length())


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens of a microbatch that this worker's routers see, in their order.

    `valid` [tokens] is false for padding. `experts` [tokens, layers, top k] are recorded expert ids of all layers of the
    model, None without a record. An id that no expert has means: no record.
    """

    valid: Tensor
    experts: Tensor | None


@dataclass(frozen=True)
class Microbatch:
    """Tensors [b, s]: `tokens`, `labels`, `positions`, and the fields of `data`. Fields of rows are repeated per token.

    `data` has `sequence_ids`, below `sequences`, if it has a loss mask. `targets` is the index of each token's label in the
    flattened batch; past the end: no label. `segments` is None if every row is one sequence, `routed` without experts.
    `scored` are the indices of the tokens whose labels are in the loss mask, None for all (`logprobs.py`).
    `row_positions` [b, width], like `segments`, are of whole rows, if this worker holds a run of each; else None. `media`
    are the ids of the media that the tokens stand for (`dagrl.data.media`), None in runs without any.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    targets: Tensor
    data: Mapping[str, Tensor]
    segments: Segments | None
    sequences: int
    routed: RoutedTokens | None = None
    scored: Tensor | None = None
    row_positions: Tensor | None = None
    media: Tensor | None = None


@dataclass(frozen=True)
class RoutedModel:
    """Sizes of a model with experts, by which a batch is split.

    With `rows_first` the routers of every worker see all tokens row by row; otherwise in the order of Megatron's hidden
    states [s, b], of which a tensor-parallel worker has a part.
    """

    vocabulary: int
    record: RoutedLayers
    rows_first: bool = False


@dataclass(frozen=True)
class Microbatches:
    """All microbatches of a batch of `rows` x `width`. `shape` is that of the first, before context parallelism.

    `filled` of the `processed` tokens are not padding. Both are this worker's share of the sums over all workers. `prefixes`
    [2, rows] has the row in which each row's first tokens are computed, and their number; None: no tokens are shared.
    `saved` are the lengths of the prefixes that are not computed again.
    """

    items: tuple[Microbatch, ...]
    rows: int
    width: int
    shape: tuple[int, int]
    filled: float
    processed: float
    rank: ParallelRank
    prefixes: Tensor | None
    saved: Indices

    def for_warmup(self) -> Microbatches:
        """Returns the few microbatches that a warm-up runs: the first ones and the last (`warmup_count`)."""
        count = warmup_count(self.rank.layout)
        items = self.items if len(self.items) <= count else (*self.items[: count - 1], self.items[-1])
        return replace(self, items=items)

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """Assembles one [b, s] per microbatch to token-aligned [rows, width]. Entry 0 of each row and padding are 0."""
        values = torch.cat([part.flatten() for part in parts])
        targets = torch.cat([item.targets.flatten() for item in self.items])
        whole = values.new_zeros(self.rows * self.width + 1).index_copy_(0, targets, values)
        if self.rank.layout.cp > 1:
            dist.all_reduce(whole, group=self.rank.context_group)  # each token's value is on one worker
        whole = whole[:-1].view(self.rows, self.width)
        if self.prefixes is None:
            return whole
        first, shared = self.prefixes
        inside = torch.arange(self.width, device=whole.device) <= shared[:, None]
        return torch.where(inside, whole[first], whole)


def split_batch(
    batch: Batch, rule: SplitRule, rank: ParallelRank, model: RoutedModel | None = None, *, masked: bool = True
) -> Microbatches:
    """Splits all rows except padding into microbatches, equally many on every worker. A collective over dp.

    No token sees padding and no loss counts it, but experts compute it, and a single id would send all of it to the same
    experts. With a `model`, which has experts, padding repeats the batch's own tokens, or the ids of the vocabulary if the
    batch is empty. Otherwise padding has id 0. The batch may have `routed_experts` (`dagrl.rl.routed_experts`). Without
    `masked`, all tokens are scored.
    """
    lengths = batch["lengths"].astype(np.int64)
    by_row = rule.by_row and rank.layout.cp > 1
    plans = [_MicrobatchPlan.of(rows, rank, by_row) for rows in plan_rows(batch, rule, rank)]
    pieces = np.array([piece for plan in plans for piece in plan.pieces], np.int64).T
    prefixes = _prefixes(plans, batch.rows)
    saved = prefixes[1][prefixes[0] != np.arange(batch.rows)]
    arrays = {name: field_bytes(array) if name == ROUTED_EXPERTS else array for name, array in batch.fields.items()}
    del arrays["lengths"]
    whole, own, sources, *columns = upload([pieces, lengths, prefixes, *arrays.values()], rank.device)
    size = sum(rows * width for rows, width in (plan.shape for plan in plans))
    table, positions = _table(whole, own, size, batch, rank, plans[0].shape[1] if by_row else None)
    fields = dict(zip(arrays, columns, strict=True))
    recorded = fields.pop(ROUTED_EXPERTS, None)
    items = _microbatches(plans, table, fields, own, model)
    if positions is not None:
        rows_positions = positions.view(len(items), -1, positions.shape[1])
        items = tuple(replace(item, row_positions=one) for item, one in zip(items, rows_positions, strict=True))
    if model is not None:
        items = _with_routed_tokens(items, table, recorded, model, rank)
    if masked and "loss_mask" in batch.fields and rank.layout.cp == 1:
        rows_of = [{piece.row for piece in plan.pieces} for plan in plans]
        scored = scored_tokens([item.data["loss_mask"] for item in items], rows_of, batch)
        items = tuple(replace(item, scored=one) for item, one in zip(items, scored, strict=True))
    filled = float(lengths.sum() - saved.sum()) / rank.layout.cp
    rows, width = plans[0].shape
    shape = (rows, width * rank.layout.cp)
    shared = sources if len(saved) else None
    return Microbatches(items, batch.rows, batch.tokens, shape, filled, float(size), rank, shared, saved)


def warmup_batches(batch: Batch, rule: SplitRule, rank: ParallelRank, seen: set[int]) -> Iterator[Batch]:
    """Yields the batch; for packed microbatches first one batch for each width that they may be padded to.

    If they can share prefixes, these rows differ in their first token, and another batch has rows that are alike.

    `seen` holds the widths that the phase has already run at in larger buckets, and is updated. The largest width comes
    first, so that memory that Megatron keeps for one shape suffices for the next.
    """
    shares = rule.shares(rank.layout)
    apart = _apart(batch) if shares else batch
    for width in reversed(row_widths(rule, rank.layout)) if rule.packed else ():
        rows = -(-width // batch.tokens)
        if rows <= batch.rows and width not in seen:
            seen.add(width)
            lengths = np.full(rows, batch.tokens)
            lengths[-1] -= rows * batch.tokens - width
            yield apart.select(range(rows)).with_fields(lengths=lengths)
    if shares:
        yield from (apart, _alike(batch))
    yield batch


def _apart(batch: Batch) -> Batch:
    tokens = batch["tokens"].copy()
    tokens[:, 0] = np.arange(batch.rows) % 2
    return batch.with_fields(tokens=tokens)


def _alike(batch: Batch) -> Batch:
    fields = {"tokens": np.repeat(batch["tokens"][:1], batch.rows, axis=0)}
    if "loss_mask" in batch.fields:
        fields["loss_mask"] = batch["loss_mask"] * (np.arange(batch.tokens) > batch.tokens // 2)
    return batch.with_fields(**fields)


@dataclass(frozen=True)
class _MicrobatchPlan:
    """A planned microbatch: its pieces, row by row, and its shape [b, s] and segments on one cp worker.

    `heads` has for each piece the index of the one with the tokens before it, -1 for none.
    """

    pieces: PlannedRow
    heads: Sequence[int]
    shape: tuple[int, int]
    segments: Segments | None

    @staticmethod
    def of(rows: list[PlannedRow], rank: ParallelRank, by_row: bool) -> _MicrobatchPlan:
        """Plans the microbatch of these rows of equal width on this worker."""
        size, part = (1, 0) if by_row else (rank.layout.cp, rank.at.cp)
        plain = size == 1 and all(len(row) == 1 for row in rows)
        pieces, heads, last = [piece for row in rows for piece in row], list[int](), -1
        for index, piece in enumerate(pieces):
            last = last if piece.start else index
            heads.append(last if piece.start else -1)
        lengths = [[piece.tokens for piece in row] for row in rows]
        segments = None if plain else make_segments(lengths, size, part, rank.device, heads)
        return _MicrobatchPlan(pieces, heads, (len(rows), sum(lengths[0]) // rank.layout.cp), segments)


def _prefixes(plans: Sequence[_MicrobatchPlan], rows: int) -> Indices:
    """Returns `Microbatches.prefixes` on the host."""
    prefixes = np.stack([np.arange(rows), np.zeros(rows, np.int64)])
    for plan in plans:
        for piece, head in zip(plan.pieces, plan.heads, strict=True):
            if head >= 0:
                prefixes[:, piece.row] = plan.pieces[head].row, piece.start
    return prefixes


@dataclass(frozen=True)
class _Table:
    """Maps the tokens of all microbatches to the flattened batch; all [n], int64.

    `sources` is the index of each token, `following` that of the next one, `nowhere` for none. `rows` is the row in the
    batch (the number of rows for padding), `positions` the position in the sequence. Computed on the model's device: on the
    CPU it would take longer than everything else before a step's first kernel.
    """

    sources: Tensor
    following: Tensor
    rows: Tensor
    positions: Tensor
    nowhere: int


def _table(
    pieces: Tensor, lengths: Tensor, size: int, batch: Batch, rank: ParallelRank, run: int | None
) -> tuple[_Table, Tensor | None]:
    """Builds the table. `pieces` [3, m] has each `Piece`; `size` tokens are here.

    With `run`, they are a run of so many tokens of each row. Then it also returns the positions of whole rows [rows, width].
    """
    numbers, starts, rooms = pieces
    parts, part = (rank.layout.cp, rank.at.cp) if run is None else (1, 0)
    held, size = rooms // parts, size * rank.layout.cp // parts  # tokens of each sequence, and of all
    owners = torch.repeat_interleave(held, output_size=size)
    positions = torch.arange(size, device=held.device) - (held.cumsum(0) - held)[owners]
    positions, of_rows = zigzag(positions, held[owners], parts, part) + starts[owners], None
    if run is not None:
        positions, owners = positions.view(-1, rank.layout.cp, run), owners.view(-1, rank.layout.cp, run)
        of_rows = positions.flatten(1)
        positions, owners = (one[:, rank.at.cp].flatten() for one in (positions, owners))
    ends = torch.where(numbers < 0, 0, lengths[numbers])[owners]
    nowhere, sources = batch.rows * batch.tokens, positions + (numbers * batch.tokens)[owners]
    table = _Table(
        sources=torch.where(positions < ends, sources, nowhere),
        following=torch.where(positions < ends - 1, sources + 1, nowhere),
        rows=torch.where(numbers < 0, batch.rows, numbers)[owners],
        positions=positions,
        nowhere=nowhere,
    )
    return table, of_rows


def _microbatches(
    plans: Sequence[_MicrobatchPlan], table: _Table, fields: Mapping[str, Tensor], lengths: Tensor, model: RoutedModel | None
) -> tuple[Microbatch, ...]:
    """Gathers every field for all microbatches at once, then splits."""
    by_token = {name: field for name, field in fields.items() if field.ndim == 2}
    media = _gather(by_token.pop(MEDIA), table.sources) if MEDIA in by_token else None
    by_row = {name: field for name, field in fields.items() if field.ndim == 1}
    data = {name: _gather(field, table.following) for name, field in by_token.items()}
    data |= {name: _gather(field, table.rows) for name, field in by_row.items()}
    if "loss_mask" in data:
        data["sequence_ids"] = table.rows
    labels, tokens = data.pop("tokens"), _gather(by_token["tokens"], table.sources)
    if model is not None:
        tokens = _fill_padding(tokens, by_token["tokens"], table, lengths, model.vocabulary)
    sizes = [rows * width for rows, width in (plan.shape for plan in plans)]
    columns = [torch.split(one, sizes) for one in (tokens, labels, table.positions, table.following, *data.values())]
    own_media = [None] * len(plans) if media is None else torch.split(media, sizes)
    items: list[Microbatch] = []
    for plan, parts, ids in zip(plans, zip(*columns, strict=True), own_media, strict=True):
        token, label, position, target, *own = (part.view(plan.shape) for part in parts)
        named = dict(zip(data, own, strict=True))
        item = Microbatch(token, label, position, target, named, plan.segments, len(lengths) + 1)
        items.append(item if ids is None else replace(item, media=ids.view(plan.shape)))
    return tuple(items)


def _with_routed_tokens(
    items: Sequence[Microbatch], table: _Table, recorded: Tensor | None, model: RoutedModel, rank: ParallelRank
) -> tuple[Microbatch, ...]:
    """Adds each microbatch's tokens as this worker's routers see them. `recorded` [rows, width, bytes]: ids of experts."""
    inside = table.sources != table.nowhere
    sizes = [item.tokens.numel() for item in items]
    columns: list[Sequence[Tensor | None]] = [torch.split(inside, sizes)]
    if recorded is None:
        columns.append([None] * len(items))
    else:
        taken = recorded.flatten(0, 1).index_select(0, torch.where(inside, table.sources, 0))
        taken = torch.where(inside[:, None], taken, MISSING)
        ids = taken if model.record.dtype.itemsize == 1 else taken.contiguous().view(torch.int16)  # 255 or -1: no record
        columns.append(torch.split(ids.view(len(ids), model.record.layers, model.record.chosen), sizes))
    if model.rows_first:
        routed = [RoutedTokens(*parts) for parts in zip(*columns, strict=True)]
    else:
        shapes = [item.tokens.shape for item in items]
        columns = [[_as_hidden(*pair, rank) for pair in zip(column, shapes, strict=True)] for column in columns]
        routed = [RoutedTokens(*parts) for parts in zip(*columns, strict=True)]
    return tuple(replace(item, routed=tokens) for item, tokens in zip(items, routed, strict=True))


def _as_hidden(values: Tensor | None, shape: Sequence[int], rank: ParallelRank) -> Tensor | None:
    """Orders values [b * s, ...] like hidden states [s, b], of which a tensor-parallel worker holds a part."""
    if values is None:
        return None
    ordered = values.view(*shape, *values.shape[1:]).transpose(0, 1)
    return ordered.chunk(rank.layout.tp)[rank.at.tp].flatten(0, 1)


def _gather(field: Tensor, index: Tensor) -> Tensor:
    """Gathers entries `index` of the flattened field. The index past its end gives 0."""
    return pad(field.flatten(), (0, 1)).index_select(0, index)


def _fill_padding(ids: Tensor, tokens: Tensor, table: _Table, lengths: Tensor, vocabulary: int) -> Tensor:
    """Fills padding in `taken` with the batch's own tokens in a cycle."""
    padding = table.sources == table.nowhere
    order = padding.cumsum(0) - 1
    ends = lengths.cumsum(0)
    number = order.remainder(ends[-1].clamp(min=1))
    row = torch.searchsorted(ends, number, right=True).clamp(max=len(lengths) - 1)
    column = number - (ends - lengths)[row]
    own = tokens.flatten().index_select(0, (row * tokens.shape[1] + column).clamp(max=tokens.numel() - 1))
    return torch.where(padding, torch.where(ends[-1] > 0, own, order.remainder(vocabulary).to(own.dtype)), ids)


def zigzag(indices: Tensor, held: Tensor, size: int, rank: int) -> Tensor:
    """Returns the sequence positions of the tokens that context-parallel worker `rank` of `size` holds.

    `indices` count the worker's own tokens of each sequence, which has `held` of them here: chunks `rank` and
    `2 size - 1 - rank` of `2 size`. This split balances causal attention (`get_batch_on_this_cp_rank` in Megatron).
    """
    if size == 1:
        return indices
    chunk = held // 2
    return indices + torch.where(indices < chunk, rank, 2 * size - 2 - rank) * chunk


def make_segments(
    rows: Sequence[Sequence[int]], size: int, rank: int, device: torch.device, heads: Sequence[int] = ()
) -> Segments:
    """Returns the segments of a microbatch for context-parallel worker `rank` of `size`.

    `rows` are the lengths of the sequences in each row before the split: multiples of `2 size` if size is above 1. `heads`
    are those of `Segments`, for size 1: segments directly follow their prefix, or others that have it.
    """
    if size == 1:
        whole = tuple(length for row in rows for length in row)
        if max(heads, default=-1) < 0:
            (starts,) = upload([_starts(whole)], device)
            return Segments(whole, whole, starts, starts, None)
        after, before = _after_prefixes(whole, heads)
        starts, query_starts, key_starts = upload([_starts(one) for one in (whole, after, before)], device)
        prefixes = Segments(after, before, query_starts, key_starts, None)
        return Segments(whole, whole, starts, starts, None, tuple(heads), prefixes)
    queries: list[int] = []
    keys: list[Indices] = []
    width = sum(rows[0]) // size  # tokens of a row on one worker
    for number, row in enumerate(rows):
        start = number * width
        for length in row:
            chunk = length // (2 * size)
            chunks = _chunk_indices(start, chunk, len(rows) * width, size)
            for held in (rank, 2 * size - 1 - rank):
                queries.append(chunk)
                keys.append(np.concatenate(chunks[: held + 1]))
            start += 2 * chunk
    lengths = [len(indices) for indices in keys]
    query_starts, key_starts, order = upload([_starts(queries), _starts(lengths), np.concatenate(keys)], device)
    return Segments(tuple(queries), tuple(lengths), query_starts, key_starts, order)


def with_prefix_keys(segments: Segments) -> Segments:
    """Returns segments whose keys are those of their prefix and their own, selected by `key_order`."""
    ends, lengths = np.cumsum(segments.key_lengths), np.array(segments.key_lengths)
    heads = np.array(segments.heads)
    sizes = np.stack([np.where(heads < 0, 0, lengths[heads]), lengths], 1).flatten()  # of prefix and rest, in turns
    starts = np.stack([(ends - lengths)[heads], ends - lengths], 1).flatten()
    order = np.arange(sizes.sum()) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    keys = sizes.reshape(-1, 2).sum(1).tolist()
    key_starts, key_order = upload([_starts(keys), order], segments.query_starts.device)
    return Segments(segments.query_lengths, tuple(keys), segments.query_starts, key_starts, key_order)


def _after_prefixes(lengths: Sequence[int], heads: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the lengths of the segments in `Segments.prefixes`, in queries and in keys."""
    after = [0] * len(lengths)
    for length, head in zip(lengths, heads, strict=True):
        if head >= 0:
            after[head] += length
    parts: list[tuple[int, int]] = []
    blind = unseen = 0  # queries and keys since the last prefix
    for length, head, queries in zip(lengths, heads, after, strict=True):
        if queries:
            parts += [(blind + length, 0), (0, unseen), (queries, length)]
            blind, unseen = 0, queries
        elif head < 0:
            blind, unseen = blind + length, unseen + length
    parts += [(blind, 0), (0, unseen)]
    return tuple(queries for queries, _ in parts), tuple(keys for _, keys in parts)


def _chunk_indices(start: int, chunk: int, tokens: int, size: int) -> list[Indices]:
    """Returns the gathered-key indices of each of a sequence's `2 size` chunks. It starts at `start` on every worker."""
    first = [number * tokens + start for number in range(size)]
    second = [number * tokens + start + chunk for number in reversed(range(size))]
    return [np.arange(index, index + chunk) for index in (*first, *second)]


def _starts(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *lengths], dtype=np.int32)


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies the arrays to the device, next to each other in one allocation.

    A GPU receives them in one asynchronous copy from pinned memory, ordered on the current stream. Separate copies from
    pageable memory would each block while the device is idle.
    """
    starts = list(accumulate((-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays), initial=0))
    host = torch.empty(starts.pop(), dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = host.numpy()
    for array, start in zip(arrays, starts, strict=True):
        np.copyto(memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape), array)
    uploaded = host.to(device, non_blocking=True)
    return [
        uploaded[start : start + array.nbytes].view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]
