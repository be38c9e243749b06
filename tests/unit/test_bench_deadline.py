"""The time that a measurement may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.deadline import Deadline, hurried
from dagrl.config.file import load_config

CONFIG = Path(__file__).parents[2] / "bench" / "step.yaml"


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_would_not_end_in_time_is_left_out_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    deadline, durations = Deadline(60.0, clock), {"start": 25.0, "short": 5.0, "long": 20.0, "next": 20.0, "last": 1.0}
    clock.now += durations.pop("start")  # what came before the first does not count as one
    begun = []
    for name in deadline.each(durations):
        begun.append(name)
        clock.now += durations[name]
    assert begun == ["short", "long"]  # 50 of 60 s are over, and the longest took 20
    assert deadline.left_out == {"next": "the time is up", "last": "the time is up"}
    deadline.tell()
    assert capsys.readouterr().err == "left out, the time is up: next; last\n"


def test_without_a_limit_all_begins(capsys: pytest.CaptureFixture[str]) -> None:
    deadline = Deadline(None)
    assert list(deadline.each(range(3))) == [0, 1, 2]
    deadline.tell()
    assert not capsys.readouterr().err


def test_waits_end_within_the_time_of_a_measurement() -> None:
    config = load_config(CONFIG, [])
    timeouts = hurried(config, 200.0).timeouts
    assert timeouts.start_s + timeouts.replay_s < 200.0 and timeouts.warmup_s < 100.0
    assert timeouts.collective_s < timeouts.replay_s < 100.0
    assert timeouts.teardown_s == config.timeouts.teardown_s
    assert hurried(config, 1e6) == hurried(config, None) == config, "what is shorter stays"
