"""The estimate that decides when requests start: survival of completions, and the blocks that they will hold."""

from __future__ import annotations

import numpy as np
import pytest

from dagrl.workers.vllm.admission import UNIT, Sequences, survival


def of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_survival_is_the_product_limit_estimate() -> None:
    """By hand: two of three are left after one ended at 3; the one at 4 is still running; the last one ends at 6."""
    found = survival(of(3, 6), of(4), longest=8)
    np.testing.assert_allclose(found, [1, 1, 1, 2 / 3, 2 / 3, 2 / 3, 0, 0, 0])


def test_without_completions_everything_is_expected_to_run_on() -> None:
    assert survival(of(), of(0, 5, 9), longest=5).tolist() == [1.0] * 6


def test_survival_of_complete_samples_is_their_share() -> None:
    lengths = np.random.default_rng(0).geometric(0.02, 3000)
    found = survival(lengths, of(), longest=400)
    for tokens in (0, 10, 100, 399):
        assert found[tokens] == pytest.approx((lengths > tokens).mean(), abs=1e-12)


def test_sequences_hold_blocks_until_their_limit() -> None:
    """A prompt of 20 tokens with one whole block shared, 4 tokens generated of at most 30, in blocks of 16."""
    sequences = Sequences(of(20), of(4), of(30), of(1), of(1))
    found, variance = sequences.expected_blocks(survival(of(), of(4), longest=64), of(0, 8, 9, 25, 26), block=16)
    assert not variance.any()
    assert (found / UNIT).tolist() == [[2 - 1, 2 - 1, 3 - 1, 4 - 1, 0]]


def test_expected_blocks_are_those_of_many_samples() -> None:
    """2,000 sequences, each of which ends with a probability of 0.01 at every token."""
    random = np.random.default_rng(1)
    lengths = random.geometric(0.01, 2000)
    alive = survival(random.geometric(0.01, 100_000), of(), longest=400)
    start = Sequences(*(np.full(2000, value) for value in (10, 0, 300, 0, 0)))
    horizons = of(0, 50, 150, 250)
    mean, variance = start.expected_blocks(alive, horizons, block=16)
    for place, horizon in enumerate(horizons.tolist()):
        held, share = -(-(10 + horizon) // 16), 0.99**horizon  # of those that run `horizon` steps
        deviation = held * (2000 * share * (1 - share)) ** 0.5
        assert abs(mean[:, place].sum() / UNIT - held * (lengths > horizon).sum()) <= 3 * deviation + 1
        assert variance[:, place].sum() ** 0.5 / UNIT == pytest.approx(deviation, rel=0.05)
