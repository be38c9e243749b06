"""Processes that meet at an address: plans for all, and errors for all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dagrl.channels import open_channel
from dagrl.errors import ChannelError, RefitPlanError
from dagrl.refit import RefitReceiver, RefitSender, WeightSlice, commit_together
from dagrl.refit.meet import Meeting, meet
from dagrl.runtime.ports import reserve_port

WEIGHT = torch.arange(24.0).view(6, 4)


def rows(first: int, last: int) -> list[WeightSlice]:
    return [WeightSlice("w", ((first, last), (0, 4)), "local", ((0, last - first), (0, 4)))]


def test_two_trainers_and_an_engine_meet_and_refit() -> None:
    address = f"127.0.0.1:{reserve_port()}"
    landed = torch.zeros(6, 4)

    def train(rank: int) -> None:
        part = WEIGHT[3 * rank : 3 * rank + 3].clone()
        plan, spec = meet(Meeting(address, "train", rank, 2, 30), rows(3 * rank, 3 * rank + 3), dtype="float32")
        channel = open_channel(spec)
        with commit_together(channel, wait=False):
            RefitSender(plan, {"local": part}, channel).send(1)
        channel.close()

    def generate() -> None:
        plan, spec = meet(Meeting(address, "generation", 0, 1, 30), rows(0, 6))
        channel = open_channel(spec)
        with commit_together(channel, wait=True):
            RefitReceiver(plan, {"local": landed}, channel).receive(1)
        channel.close()

    with ThreadPoolExecutor(3) as pool:
        for one in [pool.submit(generate), pool.submit(train, 1), pool.submit(train, 0)]:
            one.result(60)
    assert torch.equal(landed, WEIGHT)


def test_all_ranks_get_the_planners_error() -> None:
    address = f"127.0.0.1:{reserve_port()}"
    with ThreadPoolExecutor(2) as pool:
        engine = pool.submit(meet, Meeting(address, "generation", 0, 1, 30), rows(0, 6))
        trainer = pool.submit(meet, Meeting(address, "train", 0, 1, 30), rows(0, 3), dtype="float32")
        for one in (engine, trainer):
            with pytest.raises(RefitPlanError, match="'w'"):
                one.result(60)


def test_a_side_that_does_not_come_is_named() -> None:
    address = f"127.0.0.1:{reserve_port()}"
    with pytest.raises(ChannelError, match="train rank 0 of 1 did not meet the others"):
        meet(Meeting(address, "train", 0, 1, 0.5), rows(0, 3), dtype="float32")
