"""Packing against its definition: every sequence once, microbatches within budget, and few of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dagrl.errors import DataError
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.train.row_plans import SplitRule, largest, pack, row_widths, spread

LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=60)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(120, 400), st.integers(0, 5))
def test_every_sequence_is_packed_once_within_the_budget(lengths: list[int], budget: int, more: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert largest(lengths, bins) <= budget
    assert len(bins) <= 2 * sum(lengths) / budget + 1  # all but one of the microbatches are more than half full
    even = spread(lengths, bins, len(bins) + more, budget)
    assert len(even) == len(bins) + more
    assert sorted(row for rows in even for row in rows) == list(range(len(lengths)))
    assert largest(lengths, even) <= largest(lengths, bins)


def test_long_tails_waste_little() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 512).clip(8, 4096).astype(int).tolist()
    assert sum(lengths) / (4096 * len(pack(lengths, 4096))) > 0.95


def test_spread_microbatches_are_even() -> None:
    lengths = [60, 50, 40, 30, 20, 10]
    assert largest(lengths, spread(lengths, pack(lengths, 110), 2, 110)) == 110
    assert largest(lengths, spread(lengths, pack(lengths, 110), 3, 110)) == 70
    assert spread([5], [[0]], 3, 8).count([]) == 2


def test_widths_are_eighths_of_the_budget() -> None:
    assert row_widths(SplitRule(True, 1, 4096), ParallelLayout(tp=8)) == (512, 1024, 1536, 2048, 2560, 3072, 3584, 4096)
    assert row_widths(SplitRule(True, 1, 20), ParallelLayout(tp=8)) == (8, 16, 24)


def test_a_sequence_longer_than_the_budget_is_an_error() -> None:
    with pytest.raises(DataError, match=r"a sequence of 130 tokens does not fit a microbatch of 120; raise .*mb_tokens"):
        pack([10, 130], 120)
