"""Waits for a message of any kind of edge: their deadline, their end when the edge is closed, and their processor time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dagrl.runtime.edges import futex, link
from dagrl.runtime.edges.link import LinkReader, LinkWriter
from dagrl.runtime.edges.mailbox import Mailbox
from dagrl.runtime.edges.memory import EdgeClosedError, EdgeTimeoutError
from dagrl.runtime.edges.pickling import dump
from dagrl.runtime.edges.ring import Ring

PATIENCE_S = 30.0  # for what takes a moment, on a machine that does other things


@dataclass
class Edge:
    """Reads and writes one message; `ends` close it, `patience` is that of its reader."""

    read: Callable[[float], object]
    write: Callable[[], object]
    ends: list[Callable[[], None]]
    patience: futex.Patience


def of_ring() -> Edge:
    ring = Ring.create(in_flight=2, slot_bytes=1 << 20, readers=1)
    other = Ring.open(ring.address)
    return Edge(
        lambda seconds: other.read(0, seconds),
        lambda: ring.write(dump(1), 1.0),
        [ring.close, other.close],
        other._watch._patience,
    )


def of_mailbox() -> Edge:
    mailbox = Mailbox.create(1, 4)
    writer = Mailbox.open(mailbox.address)
    return Edge(
        lambda seconds: mailbox.collect(1, seconds),
        lambda: writer.post(0, 1, bytes(dump(1)[0]), 1.0),
        [mailbox.close, writer.close],
        mailbox._watch._patience,
    )


def of_link() -> Edge:
    writer = LinkWriter("127.0.0.1", 1 << 20, 2)
    reader = LinkReader(writer.address)
    writer.write(dump(0), 1.0)
    assert reader.read(PATIENCE_S) == 0  # it has connected
    return Edge(reader.read, lambda: writer.write(dump(bytes(1 << 19)), 1.0), [writer.close, reader.close], reader._patience)


@pytest.fixture(params=[of_ring, of_mailbox, of_link])
def edge(request: pytest.FixtureRequest) -> Edge:
    made: Edge = request.param()
    return made


def test_a_read_without_a_message_ends_by_its_deadline_and_takes_no_processor_time(edge: Edge) -> None:
    started, before = time.monotonic(), time.thread_time()
    with pytest.raises(EdgeTimeoutError):
        edge.read(1.0)
    assert 1.0 <= time.monotonic() - started < PATIENCE_S
    assert time.thread_time() - before < 0.05


def test_a_wait_does_not_spin_past_its_deadline(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (futex, link):
        monkeypatch.setattr(module, "let_others_run", lambda: pytest.fail("it spins"))
    edge.patience.seconds = float("inf")
    with pytest.raises(EdgeTimeoutError):
        edge.read(0.0)


@pytest.mark.parametrize("end", [0, 1], ids=["by its maker", "by the other side"])
def test_closing_wakes_a_waiting_reader_and_ends_the_writer(edge: Edge, end: int) -> None:
    errors: list[Exception] = []

    def wait() -> None:
        try:
            edge.read(600.0)
        except EdgeClosedError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    edge.ends[end]()
    waiting.join(PATIENCE_S)
    assert errors and not waiting.is_alive()
    with pytest.raises(EdgeClosedError):
        for _ in range(9):  # what the buffers of a socket have room for may still be taken
            edge.write()
