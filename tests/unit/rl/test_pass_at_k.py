"""pass@k against counting all choices of k samples."""

from __future__ import annotations

from itertools import combinations

import pytest

from dagrl.rl.pass_at_k import pass_at_k


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
