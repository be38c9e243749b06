"""Packing: assigns sequences to microbatches within a token budget. Pure; needs only numpy.

bins = pack(lengths, budget=4096)                    # nearly as few microbatches as possible
bins = spread(lengths, bins, count=6, budget=4096)   # six even ones: every shard replays equally many
width = fitting_width(largest, pack_widths(4096, 8)) # one of a few widths, so that kernels see known shapes
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from dagrl.errors import DataError

Bins = list[list[int]]
"""Microbatches, each a list of ascending sequence indices."""

WIDTHS = 8  # number of widths of packed microbatches: eighths of the budget


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


def pack_widths(budget: int, multiple: int) -> tuple[int, ...]:
    """Returns the widths of packed microbatches, ascending: eighths of the budget, rounded up to `multiple`."""
    return tuple(sorted({-(-budget * part // (WIDTHS * multiple)) * multiple for part in range(1, WIDTHS + 1)}))


def fitting_width(tokens: int, widths: Sequence[int]) -> int:
    """Returns the smallest of the ascending `widths` that holds `tokens`."""
    return next(width for width in widths if width >= tokens)
