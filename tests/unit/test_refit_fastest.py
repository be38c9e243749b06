"""Ways that are tried and chosen from, and refits that choose whether to be recorded."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from dagrl.refit import RefitReceiver, RefitSender, WeightSlice, plan_refit
from dagrl.refit.fastest import TRIALS, Fastest
from tests.unit.memory_channel import MemoryChannel


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("dagrl.refit.fastest.time.perf_counter", lambda: self.now)

    def spend(self, fastest: Fastest[str], **seconds: list[float]) -> list[str]:
        """Take turns until one way is left, each as long as is next in `seconds`; the order of ways."""
        used = []
        while not fastest.settled:
            with fastest.turn() as way:
                self.now += seconds[way].pop(0)
            used.append(way)
        return used


def test_each_way_is_tried_in_turn_and_the_least_median_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = Fastest(["a", "b"])
    used = Clock(monkeypatch).spend(fastest, a=[1, 9, 9], b=[5, 5, 20])
    assert used == ["a", "b"] * TRIALS
    for _ in range(3):
        with fastest.turn() as way:
            assert way == "b"


def test_a_turn_that_fails_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = Fastest(["a", "b"])
    with pytest.raises(OSError, match="late"), fastest.turn():
        raise OSError("late")
    assert Clock(monkeypatch).spend(fastest, a=[1, 1, 1], b=[2, 2, 2]) == ["a", "b"] * TRIALS


def test_a_single_way_is_settled() -> None:
    fastest = Fastest(["a"])
    assert fastest.settled
    with fastest.turn() as way:
        assert way == "a"


class RecordingChannel(MemoryChannel):
    """What is recorded waits `pause_s` before it is run."""

    pause_s = 0.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.recorded = self.replayed = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1

        def replay() -> None:
            time.sleep(self.pause_s)
            self.replayed += 1
            work()

        return replay


@pytest.mark.parametrize(
    ("record", "pause_s", "replayed"), [("auto", 0.05, TRIALS), (True, 0.05, 9), (False, 0.0, 0)], ids=["auto", "on", "off"]
)
def test_a_refit_goes_on_in_the_way_that_was_faster(record: Any, pause_s: float, replayed: int) -> None:
    held = WeightSlice("p", ((0, 6), (0, 10)), "t", ((0, 6), (0, 10)))
    plan = plan_refit([[WeightSlice("p", held.box, "s", held.local)]], [[held]], dtype="float32")
    queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    ends = [RecordingChannel(rank, 2, queues) for rank in range(2)]
    ends[0].pause_s = pause_s
    sent, got = torch.zeros(6, 10), torch.zeros(6, 10)
    sender = RefitSender(plan.for_rank(0), {"s": sent}, ends[0], record=record)
    receiver = RefitReceiver(plan.for_rank(1), {"t": got}, ends[1])
    for version in range(10):
        sent += 1
        sender.send(version)
        receiver.receive(version)
        assert torch.equal(got, sent)
    assert (ends[0].recorded, ends[0].replayed) == (record is not False, replayed)
    assert ends[1].recorded == 1 and ends[1].replayed in (TRIALS, 9 - TRIALS)
