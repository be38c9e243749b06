"""Mailboxes in shared memory: every writer's message of a number, in the order of the writers, whichever comes first."""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dagrl.errors import RunError
from dagrl.runtime.edges import futex
from dagrl.runtime.edges.mailbox import CELL_BYTES, Mailbox
from dagrl.runtime.edges.memory import EdgeTimeoutError

WRITERS, SLOTS = 5, 4
PATIENCE_S = 30.0  # for what takes a moment, on a machine that does other things


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox.create(WRITERS, SLOTS)


def post(mailbox: Mailbox, writer: int, number: int, value: object, timeout_s: float = 5.0) -> None:
    mailbox.post(writer, number, pickle.dumps(value), timeout_s)


def test_writers_may_be_ahead_of_each_other_and_of_the_reader(mailbox: Mailbox) -> None:
    writers = [Mailbox.open(mailbox.address) for _ in range(WRITERS)]

    def write(writer: int) -> None:
        for number in range(1, 101):
            if number % (writer + 2) == 0:
                time.sleep(0.0005)
            post(writers[writer], writer, number, number * 10 + writer, 30.0)

    with ThreadPoolExecutor(WRITERS) as pool:
        done = [pool.submit(write, writer) for writer in range(WRITERS)]
        for number in range(1, 101):
            assert mailbox.collect(number, 30.0) == [number * 10 + writer for writer in range(WRITERS)]
        for future in done:
            future.result()


def test_numbers_wrap_around(mailbox: Mailbox) -> None:
    words: Any = mailbox._words
    for index in range(len(words[: mailbox.address.first_cell // 4])):
        words[index] = 0
    start = (1 << 32) - 3
    words[16] = start - 1
    for writer in range(WRITERS):
        words[32 + writer] = start - 1
    for number in range(start, start + 8):
        for writer in range(WRITERS):
            post(mailbox, writer, number, number)
        assert mailbox.collect(number, 1.0) == [number] * WRITERS


def test_uncollected_messages_are_dropped(mailbox: Mailbox) -> None:
    for number in range(1, 4):
        for writer in range(WRITERS):
            post(mailbox, writer, number, number)
    assert mailbox.collect(3, 1.0) == [3] * WRITERS


def test_a_writer_waits_for_the_reader_when_it_is_too_far_ahead(mailbox: Mailbox) -> None:
    for number in range(1, SLOTS + 1):
        post(mailbox, 0, number, number)
    with pytest.raises(EdgeTimeoutError, match="has not read"):
        post(mailbox, 0, SLOTS + 1, 0, timeout_s=0.05)
    for writer in range(1, WRITERS):
        post(mailbox, writer, 1, 1)
    assert mailbox.collect(1, 1.0) == [1] * WRITERS
    post(mailbox, 0, SLOTS + 1, 0, timeout_s=0.05)


def test_the_reader_waits_for_a_missing_writer_until_the_deadline(mailbox: Mailbox) -> None:
    for writer in range(WRITERS - 1):
        post(mailbox, writer, 1, writer)
    started = time.monotonic()
    with pytest.raises(EdgeTimeoutError):
        mailbox.collect(1, 0.1)
    assert 0.1 <= time.monotonic() - started < PATIENCE_S
    post(mailbox, WRITERS - 1, 1, WRITERS - 1)
    assert mailbox.collect(1, 1.0) == list(range(WRITERS))


def test_a_wait_in_turns_spins_only_in_the_first(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver waits for a long replay in turns of 0.1 s. After a short replay it spins for 20 ms before it sleeps."""
    monkeypatch.setattr(futex, "LONG_SPIN_S", 0.2)
    monkeypatch.setattr(futex, "SOON_S", 60.0)
    for writer in range(1, WRITERS):
        post(mailbox, writer, 1, "first")
    threading.Timer(0.05, post, (mailbox, 0, 1, "first")).start()
    mailbox.collect(1, 30.0)  # a message that came soon
    with pytest.raises(EdgeTimeoutError):
        mailbox.collect(2, 0.25)
    before = time.thread_time()
    with pytest.raises(EdgeTimeoutError):
        mailbox.collect(2, 0.25)
    assert time.thread_time() - before < 0.1


def test_a_message_larger_than_a_cell_is_refused(mailbox: Mailbox) -> None:
    with pytest.raises(RunError, match="does not fit a cell"):
        mailbox.post(0, 1, bytes(CELL_BYTES + 1), 1.0)
