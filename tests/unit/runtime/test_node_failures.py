"""A node that fails tells the driver what failed first, whatever comes after it."""

from __future__ import annotations

import logging

import pytest

from dagrl.errors import RunError, error_text
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.executors.node import NodeCall, Take, drain_runs, failed_packet, install, run_node

CALL = NodeCall("train", "train[0].step", 0, "map", "step", (Take(0),), {}, 0, True, 1 << 20, "")


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


class WithoutWords(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_a_worker_that_was_made_again_says_what_to_do() -> None:
    with pytest.raises(RunError, match=r"\(max_restarts\); make a new WorkerGroup of the actors"):
        drain_runs(Worker(), "train")


def test_a_message_cut_within_a_character_can_be_written() -> None:
    assert error_text(ValueError("half: \ud83d")) == "ValueError: half: \\ud83d"


class Speechless:
    def __init__(self) -> None:
        self.aborted = 0
        install(self, "train", 0, "dp 0")

    def step(self, value: object) -> None:
        raise WithoutWords

    def abort(self) -> None:
        self.aborted += 1


def test_an_error_whose_own_message_fails_is_told_and_frees_the_peers() -> None:
    worker = Speechless()
    (failure,) = run_node(worker, CALL, Packet(Header("train_step", 0, False, {"train": 0}, 10.0), None)).failures
    assert failure.message == "WithoutWords, whose str() raised RuntimeError"
    assert "in step" in failure.traceback and worker.aborted == 1


def test_a_worker_that_hears_of_failures_aborts_nothing() -> None:
    worker = Speechless()
    packet = Packet(Header("train_step", 0, False, {"train": 0}, 10.0), None)
    failed = failed_packet(worker, CALL, packet, ValueError("of another node"))
    assert run_node(worker, CALL, failed).failures == failed.failures
    assert worker.aborted == 0
