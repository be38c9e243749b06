"""The timing of a replay: the longest graph decides its cost, the mean of all tells how busy its workers were."""

from __future__ import annotations

import pytest

from dagrl.runtime.replay import ReplayTiming, computing_s


def test_overhead_counts_the_longest_shard_and_idleness_all() -> None:
    timing = ReplayTiming(started=10.0, finished=15.0, shards_busy_s=(4.0, 1.0), padding_share=None)
    assert (timing.seconds, timing.busy_s, timing.mean_busy_s) == (5.0, 4.0, 2.5)
    assert timing.overhead_s() == 1.0
    assert timing.overhead_s(free=10.5) == 0.5


def replay(finished: float, *busy: float) -> ReplayTiming:
    return ReplayTiming(0.0, finished, busy, None)


@pytest.mark.parametrize(
    ("replays", "seconds"),
    [
        ([], 0.0),
        ([replay(2.0, 1.0, 1.5), replay(5.0, 2.0), replay(9.0, 4.0)], 7.5),  # one after the other: the sum
        ([replay(5.0, 5.0), replay(7.0, 5.0)], 7.0),  # two groups at once
        ([replay(9.0, 8.0), replay(3.0, 1.0), replay(8.0, 1.0)], 8.0),  # some within another one
        ([replay(6.0, 0.0)], 0.0),
    ],
)
def test_every_second_with_a_worker_computing_counts_once(replays: list[ReplayTiming], seconds: float) -> None:
    assert computing_s(replays) == pytest.approx(seconds)
    assert computing_s(reversed(replays)) == pytest.approx(seconds)
