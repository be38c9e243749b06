"""Packing: assigns sequences to microbatches within a token budget. Pure; needs only numpy.

    bins = pack(lengths, budget=4096)                    # as few microbatches as the algorithm finds
    bins = spread(lengths, bins, count=6, budget=4096)   # six even ones: every shard replays equally many
    width = fitting_width(largest, pack_widths(4096, 8)) # one of a few widths, so that kernels see known shapes

Algorithms, with NeMo-RL's names:
  modified_first_fit_decreasing  Johnson and Garey 1985, "A 71/60 theorem for bin packing", Journal of Complexity 1
  first_fit_decreasing           longest first, each into the first microbatch with room
  first_fit_shuffle              the same in an order shuffled with a fixed seed
  concatenative                  in the order given, a new microbatch whenever the last one is full
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from dagrl.errors import DataError

Bins = list[list[int]]
"""Microbatches, each a list of ascending sequence indices."""

WIDTHS = 8  # number of widths of packed microbatches: eighths of the budget


def pack(lengths: Sequence[int], budget: int, algorithm: str = "modified_first_fit_decreasing") -> Bins:
    """Packs every sequence into microbatches of at most `budget` tokens. Raises DataError if a sequence is longer."""
    if len(lengths) and max(lengths) > budget:
        raise DataError(
            f"a sequence of {max(lengths)} tokens does not fit a microbatch of {budget}; raise "
            "policy.sequence_packing.train_mb_tokens and logprob_mb_tokens, or shorten the data"
        )
    return [sorted(rows) for rows in ALGORITHMS[algorithm](list(lengths), budget)]


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


def by_length(lengths: Sequence[int], budget: int, round_to: int) -> Bins:
    """Groups sequences of similar length for dynamic batching: rows times the longest is at most `budget` tokens.

    Lengths are rounded up to `round_to`. A sequence longer than the budget gets its own microbatch.
    """
    bins: Bins = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = -(-lengths[bins[-1][0]] // round_to) * round_to if bins else 0
        if bins and (len(bins[-1]) + 1) * longest <= budget:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins


def _decreasing(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


def _first_fit(lengths: list[int], order: Sequence[int], budget: int) -> Bins:
    bins: Bins = []
    room = np.zeros(len(order), np.int64)
    for row in order:
        fits = np.flatnonzero(room[: len(bins)] >= lengths[row])
        if len(fits):
            index = int(fits[0])
        else:
            index = len(bins)
            bins.append([])
            room[index] = budget
        bins[index].append(row)
        room[index] -= lengths[row]
    return bins


def _concatenative(lengths: list[int], budget: int) -> Bins:
    bins: Bins = []
    room = 0
    for row, length in enumerate(lengths):
        if length > room or not bins:
            bins.append([])
            room = budget
        bins[-1].append(row)
        room -= length
    return bins


def _shuffled(lengths: list[int], budget: int) -> Bins:
    return _first_fit(lengths, np.random.default_rng(0).permutation(len(lengths)).tolist(), budget)


def _modified_first_fit_decreasing(lengths: list[int], budget: int) -> Bins:
    """Opens a microbatch for each sequence above half the budget, and fills these first."""
    order = _decreasing(lengths)
    large = [row for row in order if 2 * lengths[row] > budget]
    rest = _Ascending(lengths, [row for row in order if 2 * lengths[row] <= budget])
    bins = [[row] for row in large]
    room = [budget - lengths[row] for row in large]
    for index in range(len(bins)):  # add the largest that fits, of a third to a half
        _place(bins[index], room, index, rest.take_between(budget / 3, room[index]))
    for index in reversed(range(len(bins))):  # add a pair of a sixth to a third: the smallest, and the largest that fits
        if len(bins[index]) == 1 and rest.pair_fits(budget / 6, budget / 3, room[index]):
            _place(bins[index], room, index, rest.take_smallest(budget / 6))
            _place(bins[index], room, index, rest.take_between(budget / 6, min(room[index], budget / 3)))
    for index in range(len(bins)):
        while (row := rest.take_between(-1, room[index])) is not None:
            _place(bins[index], room, index, row)
    return bins + _first_fit(lengths, rest.rows[::-1], budget)


def _place(held: list[int], room: list[int], index: int, row: tuple[int, int] | None) -> None:
    if row is not None:
        held.append(row[0])
        room[index] -= row[1]


class _Ascending:
    """The remaining sequences, shortest first."""

    def __init__(self, lengths: list[int], decreasing: list[int]) -> None:
        self.rows = decreasing[::-1]
        self.sizes = [lengths[row] for row in self.rows]

    def take_between(self, low: float, high: float) -> tuple[int, int] | None:
        """Removes the longest sequence in (`low`, `high`] and returns its index and length."""
        index = bisect_right(self.sizes, high) - 1
        return self._take(index) if index >= 0 and self.sizes[index] > low else None

    def take_smallest(self, low: float) -> tuple[int, int]:
        """Removes the shortest sequence of more than `low` tokens and returns its index and length."""
        return self._take(bisect_right(self.sizes, low))

    def pair_fits(self, low: float, high: float, room: int) -> bool:
        """Whether the two shortest sequences in (`low`, `high`] fit into `room` together."""
        pair = self.sizes[bisect_right(self.sizes, low) :][:2]
        return len(pair) == 2 and pair[1] <= high and sum(pair) <= room

    def _take(self, index: int) -> tuple[int, int]:
        return self.rows.pop(index), self.sizes.pop(index)


ALGORITHMS: Mapping[str, Callable[[list[int], int], Bins]] = MappingProxyType(
    {
        "modified_first_fit_decreasing": _modified_first_fit_decreasing,
        "first_fit_decreasing": lambda lengths, budget: _first_fit(lengths, _decreasing(lengths), budget),
        "first_fit_shuffle": _shuffled,
        "concatenative": _concatenative,
    }
)
