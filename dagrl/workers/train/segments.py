"""What layers need of a microbatch in addition to hidden states: attention segments, and the tokens that routers see.

Segments exist if rows are packed or split over context-parallel workers.

A microbatch of `b` rows is flattened to `b * s` tokens. A segment is a run of queries and the keys they see. It is causal
from its end: the last query sees every key, the previous one all but the last, and so on. A packed sequence is one segment.
Under context parallelism a worker holds two chunks of every sequence (`zigzag`), which are two segments: each has the
chunk's queries and all keys up to the chunk's end, selected from the gathered keys.

Segments may share a prefix (`dagrl.workers.train.prefixes`): another segment, whose keys all their queries see too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dagrl.workers.train.host_memory import upload

Indices = npt.NDArray[np.int64]

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
