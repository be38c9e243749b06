"""A node that fails tells the driver what failed first, whatever comes after it."""

from __future__ import annotations

import logging

import pytest

from dagrl.executors.node import NodeCall, Take, install, run_node
from dagrl.executors.packet import Header, Packet

CALL = NodeCall("train[0].step", 0, "map", "step", (Take(0),), {}, 0, True, 1 << 20, "")


class Worker:
    def step(self, value: object) -> None:
        raise ValueError("the step's own error")

    def abort(self) -> None:
        raise RuntimeError("the abort's error")


def test_an_abort_that_raises_does_not_hide_why_it_was_called(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    install(worker, "train", 3, "dp 3")
    with caplog.at_level(logging.WARNING):
        packet = run_node(worker, CALL, Packet(Header("train_step", 0, False, {"train": 0}, 10.0), None))
    (failure,) = packet.failures
    assert (failure.role, failure.rank, failure.message) == ("train", 3, "ValueError: the step's own error")
    assert "the abort's error" in caplog.text
