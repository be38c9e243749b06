"""Rows of `dagrl bench step` from the metrics of their steps."""

from __future__ import annotations

import pytest

from dagrl.bench import step
from dagrl.config import Config

CONFIG = Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": {"generation": {}}})
"""Two workers, one per role."""

SYNC, IN_FLIGHT = (variant for variant in step.VARIANTS if variant.name in ("sync", "in flight, age 1"))


def measured(seconds: float, **changes: float) -> step.Metrics:
    names = {"update": "timing_s/update", "pause": "timing_s/update_pause", "refit": "timing_s/refit"}
    times = {names[name]: value for name, value in changes.items()}
    return {"trained_tokens": 100.0, "timing_s/total": seconds, "staleness/policy_age_max": 1.0, **times}


def test_every_age_has_variants_with_and_without_in_flight_updates() -> None:
    found = {(variant.in_flight, variant.age) for variant in step.VARIANTS if variant.enabled}
    assert found == {(in_flight, age) for age in (1, 2, 4, 8) for in_flight in (True, False)}
    assert step.VARIANTS[-3:] == step.WAITING, "variants with little gain come last, where a deadline cuts"


def test_rows_have_update_time_and_generation_pause() -> None:
    rounds = [
        [measured(2.0, update=0.5, pause=0.01, refit=0.3), measured(2.0, update=0.7, pause=0.04, refit=0.3)],
        [measured(2.0, update=0.9, pause=0.02, refit=0.3)],
    ]
    row = step.as_row(CONFIG, IN_FLIGHT, rounds)
    assert row["update_pause_s"] == 0.04, "the longest of all"
    assert row["update_s"] == pytest.approx((0.6 + 0.9) / 2)


def test_plain_calls_pause_generation_for_their_whole_refit(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = {step.PLAIN: [[measured(4.0, refit=0.3)]], SYNC: [[measured(2.0, update=0.021, pause=0.006, refit=0.02)]]}
    plain, sync = step.as_rows(CONFIG, rounds)
    assert (plain["update_s"], plain["update_pause_s"], sync["update_pause_s"], sync["speedup"]) == (0.0, 0.3, 0.006, 2.0)
    assert sync["tokens_per_s_per_worker_low"] == sync["tokens_per_s_per_worker"] == 25.0
    reordered = step.as_rows(CONFIG, dict(reversed(rounds.items())))
    assert [row["speedup"] for row in reordered] == [2.0, 1.0], "relative to plain calls in any order"
    assert [row["speedup"] for row in step.as_rows(CONFIG, {SYNC: rounds[SYNC]})] == [1.0]
    step.print_table([plain, sync])
    table = capsys.readouterr().out
    assert "pause" in table and "300" in table and " 21 " in table
