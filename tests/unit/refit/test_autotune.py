"""Choosing the fastest method, and refits that choose whether to replay a recording."""

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
from dagrl.refit.carry.endpoint import TRIALS, Autotune
from dagrl.refit.carry.pack import BucketMemory
from dagrl.refit.carry.verify import checksums
from tests.unit.refit.memory_channel import Done, MemoryChannel


@pytest.mark.parametrize("fails", [False, True])
def test_methods_take_turns_and_the_lowest_median_wins(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that raises does not count."""
    now, seconds, used = [0.0], {"a": [1, 9, 9], "b": [5, 5, 20]}, []
    monkeypatch.setattr("dagrl.refit.carry.endpoint.time.perf_counter", lambda: now[0])
    autotune = Autotune(["a", "b"])
    if fails:
        with pytest.raises(ZeroDivisionError):
            autotune.run(lambda method: 1 / 0)

    def act(method: str) -> None:
        used.append(method)
        now[0] += seconds[method].pop(0) if seconds[method] else 0

    for _ in range(2 * TRIALS + 3):
        autotune.run(act)
    assert used == ["a", "b"] * TRIALS + ["b"] * 3


class RecordingChannel(MemoryChannel):
    """Recorded work waits `pause_s` before it runs."""

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
def test_refits_continue_with_the_faster_method(record: Any, pause_s: float, replayed: int) -> None:
    held = WeightSlice("p", ((0, 6), (0, 10)), "t", ((0, 6), (0, 10)))
    plan = plan_refit([[WeightSlice("p", held.box, "s", held.local)]], [[held]], dtype="float32")
    queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    ends = [RecordingChannel(rank, 2, queues) for rank in range(2)]
    ends[0].pause_s = pause_s
    sent, got = torch.zeros(6, 10), torch.zeros(6, 10)
    sender = RefitSender(plan.for_rank(0, record=record), {"s": sent}, ends[0])
    receiver = RefitReceiver(plan.for_rank(1), {"t": got}, ends[1])
    for version in range(10):
        sent += 1
        sender.send(version)
        receiver.receive(version)
        assert torch.equal(got, sent)
    assert (ends[0].recorded, ends[0].replayed) == (record is not False, replayed)
    assert ends[1].recorded == 1 and ends[1].replayed in (TRIALS, 9 - TRIALS)


def test_moved_tensors_are_recorded_again() -> None:
    """The next refit launches rounds one by one, like the first: the recording writes to freed memory."""
    box = ((0, 6), (0, 10))
    plan = plan_refit([[WeightSlice("p", box, "t", box)]], [[WeightSlice("p", box, "t", box)]], dtype="float32")
    queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    channel, sent = RecordingChannel(0, 2, queues), torch.nn.Parameter(torch.zeros(6, 10))
    sender = RefitSender(plan.for_rank(0, record=True), {"t": sent}, channel)
    counts = []
    for version in range(6):
        if version == 3:
            sent.data = torch.ones(6, 10)
        sender.send(version)
        counts.append((channel.recorded, channel.replayed))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 2), (2, 3), (2, 4)]


class GraphChannel(MemoryChannel):
    """Records like a CUDA graph: nothing runs while recording, and replays write to the tensors made then."""

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
def test_a_wrong_byte_is_found_with_every_method(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded or launched one by one: the sums are those of this refit, not of the previous one."""
    box = ((0, 6), (0, 10))
    plan = plan_refit([[WeightSlice("p", box, "t", box)]], [[WeightSlice("p", box, "t", box)]], dtype="float32")
    queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    channels = [GraphChannel(rank, queues) for rank in range(2)]
    sent, got = torch.zeros(6, 10), torch.zeros(6, 10)
    sender = channels[0].end = RefitSender(plan.for_rank(0, "checksum"), {"t": sent}, channels[0])
    receiver = channels[1].end = RefitReceiver(plan.for_rank(1, "checksum"), {"t": got}, channels[1])
    for version in range(wrong + 1):
        sent += 1
        channels[0].spoiling = version == wrong
        for channel, carry in ((channels[0], sender.send), (channels[1], receiver.receive)):
            monkeypatch.setattr("dagrl.refit.carry.endpoint.checksums", channel.checksums)
            if version < wrong or channel is channels[0]:
                carry(version)
                continue
            with pytest.raises(RunError, match="parameter 'p'"):
                carry(version)
