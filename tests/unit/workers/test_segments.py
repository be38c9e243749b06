"""Segments under context parallelism: each token sees its own sequence up to itself."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from dagrl.workers.train.microbatches import Segments, make_segments

CPU = torch.device("cpu")
SIZES = [2, 3, 4]


def held(length: int, size: int, rank: int) -> list[list[int]]:
    """Positions of a worker's two chunks of a sequence (`get_batch_on_this_cp_rank` in Megatron)."""
    chunks = torch.arange(length).view(2 * size, -1)
    return [chunks[rank].tolist(), chunks[2 * size - 1 - rank].tolist()]


def rows_of(size: int) -> list[list[int]]:
    """Returns two rows of equal length with several sequences each, of multiples of `2 size`."""
    return [[2 * size * chunk for chunk in row] for row in ([3, 1, 5], [2, 7])]


def tokens_of(rows: list[list[int]], size: int, rank: int) -> list[tuple[int, int, int]]:
    """Returns (row, sequence, position) of a worker's tokens in order."""
    return [
        (row, number, position)
        for row, sequences in enumerate(rows)
        for number, length in enumerate(sequences)
        for chunk in held(length, size, rank)
        for position in chunk
    ]


@pytest.mark.parametrize(("size", "rank"), [(size, rank) for size in SIZES for rank in range(size)])
def test_a_segment_has_all_keys_of_its_sequence_up_to_its_last_query(size: int, rank: int) -> None:
    rows = rows_of(size)
    segments = make_segments(rows, size, rank, CPU)
    assert segments.key_order is not None
    gathered = [token for other in range(size) for token in tokens_of(rows, size, other)]
    keys = [gathered[place] for place in segments.key_order.tolist()]
    queries = tokens_of(rows, size, rank)
    assert len(segments.query_lengths) == len(segments.key_lengths) == 2 * sum(map(len, rows))
    for mine, seen in zip(parts(segments.query_starts, queries), parts(segments.key_starts, keys), strict=True):
        row, number, last = mine[-1]
        assert seen == [(row, number, position) for position in range(last + 1)]
        assert mine == seen[-len(mine) :]
    assert (segments.longest_query, segments.longest_key) == (max(segments.query_lengths), max(segments.key_lengths))
    assert segments.query_starts.tolist() == list(accumulate(segments.query_lengths, initial=0))
    assert segments.key_starts.tolist() == list(accumulate(segments.key_lengths, initial=0))


def parts(starts: Tensor, tokens: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    assert (starts[0], starts[-1], starts.dtype) == (0, len(tokens), torch.int32)
    return [tokens[start:stop] for start, stop in pairwise(starts.tolist())]


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=6))
def test_queries_after_a_prefix_see_its_keys_and_others_none(groups: list[list[int]]) -> None:
    """The first segment of each group is the prefix of the others."""
    lengths = [length for group in groups for length in group]
    firsts = list(accumulate((len(group) for group in groups), initial=0))
    heads = [first if place else -1 for first, group in zip(firsts, groups, strict=False) for place in range(len(group))]
    segments = make_segments([lengths], 1, 0, CPU, heads)
    starts = list(accumulate(lengths, initial=0))
    expected = [range(starts[head], starts[head + 1]) if head >= 0 else range(0) for head in heads]
    assert segments.heads == (tuple(heads) if max(heads) >= 0 else ())
    if segments.prefixes is None:
        assert max(heads) < 0
        return
    seen = [
        range(*keys)
        for queries, keys in zip(*map(pairwise, starts_of(segments.prefixes)), strict=True)
        for _ in range(*queries)
    ]
    wanted = [keys for length, keys in zip(lengths, expected, strict=True) for _ in range(length)]
    assert list(map(list, seen)) == list(map(list, wanted))
    assert segments.prefixes.key_starts[-1] == len(seen) == sum(lengths)


def starts_of(segments: Segments) -> list[list[int]]:
    return [segments.query_starts.tolist(), segments.key_starts.tolist()]
