"""Waiting until nothing disturbs a measurement."""

from __future__ import annotations

import itertools

import pytest

from bench import measure


def test_a_host_that_comes_to_rest_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = [(0, 0), (20, 100), (20, 100), (70, 200), (70, 200), (165, 300)]  # 20 %, 50 % and 95 % idle
    monkeypatch.setattr(measure, "_processor_ticks", iter(windows).__next__)
    assert measure.wait_for_quiet(60.0, window_s=0.0)


def test_a_busy_host_is_waited_for_no_longer_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_processor_ticks", ((0, 100 * number) for number in itertools.count()).__next__)
    assert not measure.wait_for_quiet(0.2, window_s=0.01)


def test_processor_time_grows_by_what_all_cores_have() -> None:
    (idle, total), (later_idle, later_total) = measure._processor_ticks(), measure._processor_ticks()
    assert 0 < idle < total and later_idle >= idle and later_total >= total
