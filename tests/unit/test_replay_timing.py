"""What a replay says of its time: the longest graph decides what it cost, the mean of all how busy its workers were."""

from __future__ import annotations

from dagrl.replay import ReplayTiming


def test_overhead_is_of_the_longest_shard_and_idleness_of_all() -> None:
    timing = ReplayTiming(started=10.0, finished=15.0, shards_busy_s=(4.0, 1.0), padding_share=None)
    assert (timing.seconds, timing.busy_s, timing.mean_busy_s) == (5.0, 4.0, 2.5)
    assert timing.overhead_s() == 1.0
    assert timing.overhead_s(free=10.5) == 0.5
