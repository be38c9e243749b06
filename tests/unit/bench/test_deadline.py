"""The time limit of a benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.bench.deadline import BenchDeadline, hurried
from dagrl.config.file import load_config

CONFIG = Path(__file__).parents[3] / "bench" / "step.yaml"


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_items_without_time_are_left_out_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    deadline, durations = BenchDeadline(60.0, clock), {"start": 25.0, "short": 5.0, "long": 20.0, "next": 20.0, "last": 1.0}
    clock.now += durations.pop("start")  # time before the first item does not count
    begun = []
    for name in deadline.each(durations):
        begun.append(name)
        clock.now += durations[name]
    assert begun == ["short", "long"]  # 50 of 60 s have passed and the longest item took 20
    assert deadline.left_out == {"next": "the time is up", "last": "the time is up"}
    deadline.tell()
    assert capsys.readouterr().err == "left out, the time is up: next, last\n"


def test_no_limit_allows_everything(capsys: pytest.CaptureFixture[str]) -> None:
    deadline = BenchDeadline(None)
    assert list(deadline.each(range(3))) == [0, 1, 2]
    deadline.tell()
    assert not capsys.readouterr().err


def test_timeouts_fit_into_the_limit() -> None:
    config = load_config(CONFIG, [])
    timeouts = hurried(config, 200.0).timeouts
    assert timeouts.start_s + timeouts.replay_s < 200.0 and timeouts.warmup_s < 100.0
    assert timeouts.collective_s < timeouts.replay_s < 100.0
    assert timeouts.teardown_s == config.timeouts.teardown_s
    assert hurried(config, 1e6) == hurried(config, None) == config, "shorter timeouts are unchanged"
