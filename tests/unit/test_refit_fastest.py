"""Ways that are tried and chosen from, and refits that choose whether to be recorded."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from dagrl.errors import RunError
from dagrl.refit import RefitReceiver, RefitSender, WeightSlice, plan_refit
from dagrl.refit.fastest import TRIALS, Fastest
from dagrl.refit.pack import BucketMemory
from dagrl.refit.verify import checksums
from tests.unit.memory_channel import Done, MemoryChannel


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


def test_tensors_that_moved_are_recorded_anew() -> None:
    """After a refit one by one, as at first: what was recorded writes to memory that is gone."""
    box = ((0, 6), (0, 10))
    plan = plan_refit([[WeightSlice("p", box, "t", box)]], [[WeightSlice("p", box, "t", box)]], dtype="float32")
    queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    channel, sent = RecordingChannel(0, 2, queues), torch.nn.Parameter(torch.zeros(6, 10))
    sender = RefitSender(plan.for_rank(0), {"t": sent}, channel, record=True)
    counts = []
    for version in range(6):
        if version == 3:
            sent.data = torch.ones(6, 10)
        sender.send(version)
        counts.append((channel.recorded, channel.replayed))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 2), (2, 3), (2, 4)]


class GraphChannel(MemoryChannel):
    """As a CUDA graph: what is recorded is not run then, and run later writes to the tensors that were made at that time."""

    recording = spoiling = False

    def __init__(self, rank: int, queues: Any) -> None:
        super().__init__(rank, 2, queues)
        self.end: RefitSender | RefitReceiver | None = None
        self._made: dict[int, Tensor] = {}

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> list[Done]:
        return [] if self.recording else super().exchange(sends, receives)

    def send(self, tensor: Tensor, peer: int) -> Done:
        if self.spoiling and tensor.dtype == torch.uint8:
            tensor, self.spoiling = tensor ^ 4, False
        return super().send(tensor, peer)

    def checksums(self, memory: BucketMemory) -> Tensor:
        sums = checksums(memory)
        if self.recording:
            self._made[id(memory)] = sums
        return sums

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recording = True
        work()
        self.recording = False
        return self._replay

    def _replay(self) -> None:
        assert self.end is not None
        self.end.rounds.run(self._sum, self._unpack)

    def _unpack(self, memory: BucketMemory) -> None:
        memory.unpack()
        self._sum(memory)

    def _sum(self, memory: BucketMemory) -> None:
        self._made[id(memory)].copy_(checksums(memory))


@pytest.mark.parametrize("wrong", range(1, 7))
def test_a_wrong_byte_is_found_in_whichever_way_it_came(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded or one by one, in turn: sums are those of this refit, not of the one before."""
    box = ((0, 6), (0, 10))
    plan = plan_refit([[WeightSlice("p", box, "t", box)]], [[WeightSlice("p", box, "t", box)]], dtype="float32")
    queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    channels = [GraphChannel(rank, queues) for rank in range(2)]
    sent, got = torch.zeros(6, 10), torch.zeros(6, 10)
    sender = channels[0].end = RefitSender(plan.for_rank(0), {"t": sent}, channels[0], "checksum")
    receiver = channels[1].end = RefitReceiver(plan.for_rank(1), {"t": got}, channels[1], "checksum")
    for version in range(wrong + 1):
        sent += 1
        channels[0].spoiling = version == wrong
        for channel, carry in ((channels[0], sender.send), (channels[1], receiver.receive)):
            monkeypatch.setattr("dagrl.refit.run.checksums", channel.checksums)
            if version < wrong or channel is channels[0]:
                carry(version)
                continue
            with pytest.raises(RunError, match="parameter 'p'"):
                carry(version)
