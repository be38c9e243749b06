"""Forced lengths have the configured distribution, and equal seeds give equal lengths."""

from __future__ import annotations

import numpy as np
import pytest

from dagrl.config import ForcedLengths
from dagrl.rl.rollout.episodes import forced_lengths


def test_median_spread_and_share_between_prompts() -> None:
    config = ForcedLengths(median=640, sigma=0.8)
    table = np.log([forced_lengths(config, 0, key, range(key * 100, key * 100 + 30), 10**9) for key in range(500)])
    assert np.exp(np.median(table)) == pytest.approx(640, rel=0.06)
    assert table.std() == pytest.approx(0.8, rel=0.05)
    between = table.mean(axis=1).var() - table.var(axis=1).mean() / 30
    assert between / table.var() == pytest.approx(0.5, abs=0.05)


def test_lengths_follow_the_seed_and_are_bounded() -> None:
    config = ForcedLengths(median=30, sigma=2.0)
    first = forced_lengths(config, 0, 3, range(100), 64)
    assert first == forced_lengths(config, 0, 3, range(100), 64) != forced_lengths(config, 0, 4, range(100), 64)
    assert min(first) >= 1 and max(first) == 64
