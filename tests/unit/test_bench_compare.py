"""What the rows of `dagrl bench step` and `dagrl bench compare` make of the metrics of their steps."""

from __future__ import annotations

import pytest

from bench import compare, step
from dagrl.config import Config

CONFIG = Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": {"generation": {}}})
"""Two workers, one of each role."""

SYNC, IN_FLIGHT = (way for way in step.WAYS if way.name in ("sync", "in flight, age 1"))


def measured(seconds: float, **changes: float) -> step.Metrics:
    names = {"update": "timing_s/update", "pause": "timing_s/update_pause", "refit": "timing_s/refit"}
    times = {names[name]: value for name, value in changes.items()}
    return {"trained_tokens": 100.0, "timing_s/total": seconds, "staleness/policy_age_max": 1.0, **times}


def test_every_age_is_measured_with_updates_in_flight_and_without() -> None:
    found = {(way.in_flight, way.age) for way in step.WAYS if way.enabled}
    assert found == {(in_flight, age) for age in (1, 2, 4, 8) for in_flight in (True, False)}
    assert step.WAYS[-3:] == step.WAITING, "those that bring little come last, where a deadline cuts"
    assert not set(step.WAITING) & set(compare.CHOICE)


def test_rows_tell_what_an_update_takes_and_how_long_it_stops_generation() -> None:
    rounds = [
        [measured(2.0, update=0.5, pause=0.01, refit=0.3), measured(2.0, update=0.7, pause=0.04, refit=0.3)],
        [measured(2.0, update=0.9, pause=0.02, refit=0.3)],
    ]
    for result in (compare.as_result(CONFIG, IN_FLIGHT, rounds), step.as_result(CONFIG, IN_FLIGHT, rounds, None)):
        assert result.update_pause_s == 0.04, "the longest of all"
    assert compare.as_result(CONFIG, IN_FLIGHT, rounds).update_s == 0.7
    assert step.as_result(CONFIG, IN_FLIGHT, rounds, None).update_s == pytest.approx((0.6 + 0.9) / 2)


def test_plain_calls_stop_generation_for_their_whole_refit(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = {step.PLAIN: [[measured(4.0, refit=0.3)]], SYNC: [[measured(2.0, update=0.021, pause=0.006, refit=0.02)]]}
    plain, sync = compare.as_results(CONFIG, rounds)
    assert (plain.update_s, plain.update_pause_s, sync.update_pause_s, sync.times_plain) == (0.0, 0.3, 0.006, 2.0)
    reordered = compare.as_results(CONFIG, dict(reversed(rounds.items())))
    assert [row.times_plain for row in reordered] == [2.0, 1.0], "of plain calls, whatever was measured first"
    assert [row.times_plain for row in compare.as_results(CONFIG, {SYNC: rounds[SYNC]})] == [None]
    compare.print_table([plain, sync])
    table = capsys.readouterr().out
    assert "pause" in table and "300" in table and " 21 " in table
