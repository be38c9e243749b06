"""Waiting for a quiet host."""

from __future__ import annotations

import itertools

import pytest

from dagrl.bench import measure


def test_a_host_that_becomes_idle_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = [(0, 0), (20, 100), (20, 100), (70, 200), (70, 200), (165, 300)]  # 20 %, 50 % and 95 % idle
    monkeypatch.setattr(measure, "_processor_ticks", iter(windows).__next__)
    assert measure.wait_for_quiet(60.0, window_s=0.0)


def test_waiting_for_a_busy_host_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_processor_ticks", ((0, 100 * number) for number in itertools.count()).__next__)
    assert not measure.wait_for_quiet(0.2, window_s=0.01)


def test_processor_ticks_increase() -> None:
    (idle, total), (later_idle, later_total) = measure._processor_ticks(), measure._processor_ticks()
    assert 0 < idle < total and later_idle >= idle and later_total >= total
