"""pass@k against counting all choices of k samples, and intervals against the test that they invert."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from dagrl.rl.pass_at_k import interval, pass_at_k


@pytest.mark.parametrize("samples, right", [(1, 0), (1, 1), (6, 0), (6, 2), (6, 5), (6, 6)])
def test_it_is_the_share_of_choices_with_a_right_one(samples: int, right: int) -> None:
    outcomes = [place < right for place in range(samples)]
    for k in range(1, samples + 1):
        choices = list(combinations(outcomes, k))
        assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize("k", [0, 5])
def test_k_must_be_a_number_of_samples(k: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 4"):
        pass_at_k(4, 2, k)


@pytest.mark.parametrize("right, count", [(0, 20), (41, 1319), (7, 7), (250, 500)])
def test_the_interval_is_wilsons(right: int, count: int) -> None:
    """Its ends are the shares p of which the one found is 1.96 standard deviations sqrt(p (1 - p) / n) away."""
    share = right / count
    for end in interval(share, count):
        assert abs(share - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / count), abs=1e-9)
    assert interval(share, count)[0] < interval(share, count)[1]


def test_an_interval_needs_a_trial() -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        interval(0.0, 0)
