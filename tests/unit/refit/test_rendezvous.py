"""Processes that meet at an address: plans for all, errors for all, and messages that run nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from dagrl.channels import ChannelSpec, open_channel
from dagrl.errors import ChannelError, RefitPlanError, RunError
from dagrl.refit import RefitReceiver, RefitSender, WeightSlice, commit_together, plan_refit
from dagrl.refit.rendezvous import Meeting, meet, read_message, while_called, write_message
from dagrl.runtime.store import reserve_port

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


def test_ranks_that_do_not_come_are_named() -> None:
    address = f"127.0.0.1:{reserve_port()}"
    with pytest.raises(ChannelError, match=r"^train rank 1, generation rank 0 did not meet train rank 0"):
        meet(Meeting(address, "train", 0, 2, 0.2), rows(0, 3), dtype="float32")


def test_a_call_that_fails_ends_the_meeting_of_all_ranks_at_once() -> None:
    """For example a server without the routes for weights."""
    address = f"127.0.0.1:{reserve_port()}"

    def fail() -> None:
        raise ValueError("404 Not Found")

    def lead(check: Callable[[], None]) -> object:
        return meet(Meeting(address, "train", 0, 2, 600), rows(0, 3), dtype="float32", while_waiting=check)

    with ThreadPoolExecutor(2) as pool:
        leads = pool.submit(while_called, lead, [fail])
        other = pool.submit(meet, Meeting(address, "train", 1, 2, 600), rows(3, 6))
        for one in (leads, other):
            with pytest.raises(RunError, match="404 Not Found"):
                one.result(60)


def test_two_processes_cannot_meet_as_one_rank() -> None:
    """Two engines that one client calls would both be rank 0 of 1."""
    address = f"127.0.0.1:{reserve_port()}"
    with ThreadPoolExecutor(4) as pool:
        engines = [pool.submit(meet, Meeting(address, "generation", 0, 1, 30), rows(0, 6)) for _ in range(2)]
        leads = pool.submit(meet, Meeting(address, "train", 0, 2, 30), rows(0, 3), dtype="float32")
        (refused,), _ = wait(engines, 30, FIRST_COMPLETED)  # the others wait for the second trainer
        with pytest.raises(ChannelError, match=r"another process met at .* as generation rank 0 of 1"):
            refused.result(0)
        follows = pool.submit(meet, Meeting(address, "train", 1, 2, 30), rows(3, 6))
        for one in {*engines, leads, follows} - {refused}:
            one.result(60)


HELD = WeightSlice("w", ((0, 6), (0, 4)), "local", ((0, 6), (0, 4)))
PLAN = plan_refit([[HELD]], [[HELD]], dtype="float32").for_rank(0)
SPEC = ChannelSpec("gloo", "127.0.0.1:1", 0, 2)
MESSAGE = write_message((PLAN, SPEC))


class Runs:
    """A pickle that makes a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_plans_slices_and_errors_arrive() -> None:
    assert read_message(MESSAGE, "train rank 0") == (PLAN, SPEC)
    assert read_message(write_message(((HELD,), "host", "")), "train rank 0") == ((HELD,), "host", "")
    error = read_message(write_message(RefitPlanError("no plan")), "train rank 0")
    assert isinstance(error, RefitPlanError) and str(error) == "no plan"
    error = read_message(write_message(KeyError("x")), "train rank 0")
    assert isinstance(error, RunError) and "KeyError" in str(error)


def test_a_message_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(ChannelError, match=r"train rank 3 is not one of dagrl .* it names posix\.mkdir"):
        read_message(write_message((HELD, Runs(tmp_path / "made"))), "train rank 3")
    assert not (tmp_path / "made").exists()


@given(data=st.data())
def test_a_damaged_message_is_an_error(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(MESSAGE) - 1))
    cut = MESSAGE[:at]
    flipped = MESSAGE[:at] + bytes([MESSAGE[at] ^ data.draw(st.integers(1, 255))]) + MESSAGE[at + 1 :]
    for message in (cut, flipped):
        with pytest.raises(ChannelError, match="its checksum differs"):
            read_message(message, "train rank 0")
