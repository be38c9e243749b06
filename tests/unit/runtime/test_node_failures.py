"""A node that fails tells the driver what failed first, whatever comes after it."""

from __future__ import annotations

import logging

import pytest

from dagrl.errors import RunError, error_text
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.executors.node import NodeCall, Take, drain_runs, failed_packet, install, run_node

CALL = NodeCall("train", "train[0].step", 0, "map", "step", (Take(0),), {}, 0, True, 1 << 20, "")


PACKET = Packet(Header("train_step", 0, False, {"train": 0}, 10.0), None)


class WithoutWords(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Worker:
    """Fails with an error whose own message fails, and so does its abort."""

    aborted = 0

    def step(self, value: object) -> None:
        raise WithoutWords

    def abort(self) -> None:
        self.aborted += 1
        raise RuntimeError("the abort's error")


@pytest.fixture
def worker() -> Worker:
    worker = Worker()
    install(worker, "train", 3, "dp 3")
    return worker


def test_broken_messages_and_aborts_do_not_hide_the_failure(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (failure,) = run_node(worker, CALL, PACKET).failures
    assert (failure.role, failure.rank) == ("train", 3)
    assert failure.message == "WithoutWords, whose str() raised RuntimeError" and "in step" in failure.traceback
    assert worker.aborted == 1 and "the abort's error" in caplog.text


def test_a_restarted_worker_says_what_to_do() -> None:
    with pytest.raises(RunError, match=r"\(max_restarts\); make a new WorkerGroup of the actors"):
        drain_runs(Worker(), "train")


def test_a_message_cut_within_a_character_can_be_written() -> None:
    assert error_text(ValueError("half: \ud83d")) == "ValueError: half: \\ud83d"


def test_a_worker_that_hears_of_failures_aborts_nothing(worker: Worker) -> None:
    failed = failed_packet(worker, CALL, PACKET, ValueError("of another node"))
    assert run_node(worker, CALL, failed).failures == failed.failures
    assert worker.aborted == 0
