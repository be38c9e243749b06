"""All kinds of edges: arrays that are kept, and waits that end by a deadline or with the edge."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dagrl.runtime.edges import futex, link
from dagrl.runtime.edges.link import LinkReader, LinkWriter
from dagrl.runtime.edges.mailbox import Mailbox
from dagrl.runtime.edges.memory import EdgeClosedError, EdgeTimeoutError, MessageTooLargeError
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.edges.pickling import dump
from dagrl.runtime.edges.ring import Ring
from dagrl.runtime.shapes import Batch

PATIENCE_S = 30.0  # for what takes a moment, on a machine that does other things


@dataclass
class Edge:
    """Reads and writes messages; `ends` close it, `patience` is that of its reader."""

    read: Callable[[float], Any]
    write: Callable[[object], None]
    ends: list[Callable[[], None]]
    patience: futex.Patience


def of_ring(readers: int = 1) -> Edge:
    ring = Ring.create(in_flight=2, slot_bytes=1 << 20, readers=readers)
    reader, second = Ring.open(ring.address), Ring.open(ring.address)

    def write(value: object) -> None:
        ring.write(dump(value), 1.0)
        if readers == 2:
            second.skip(1, 1.0)

    return Edge(lambda seconds: reader.read(0, seconds), write, [ring.close, reader.close], reader._watch._patience)


def of_shared_ring() -> Edge:
    """A ring with two readers, whose views are read-only."""
    return of_ring(2)


def of_mailbox() -> Edge:
    mailbox = Mailbox.create(1, 4)
    writer = Mailbox.open(mailbox.address)
    return Edge(
        lambda seconds: mailbox.collect(1, seconds),
        lambda value: writer.post(0, 1, bytes(dump(value)[0]), 1.0),
        [mailbox.close, writer.close],
        mailbox._watch._patience,
    )


def of_link() -> Edge:
    writer = LinkWriter("127.0.0.1", 1 << 20, 2)
    reader = LinkReader(writer.address)
    writer.write(dump(0), 1.0)
    assert reader.read(PATIENCE_S) == 0  # it has connected
    return Edge(reader.read, lambda value: writer.write(dump(value), 1.0), [writer.close, reader.close], reader._patience)


@pytest.fixture(params=[of_ring, of_mailbox, of_link])
def edge(request: pytest.FixtureRequest) -> Edge:
    made: Edge = request.param()
    return made


@pytest.mark.parametrize("make", [of_ring, of_shared_ring, of_link])
def test_arrays_of_a_batch_hold_its_memory(make: Callable[[], Edge]) -> None:
    """The reader keeps only arrays of the message, or views of them."""
    edge, kept = make(), []
    for number in range(1, 21):
        batch = Batch({"lengths": np.full(100, number), "tokens": np.full((100, 1000), number)})
        edge.write(Packet(Header("train_step", number, False, {"train": 0}, 1.0), batch).wire())
        read = Packet.from_wire(edge.read(PATIENCE_S)).value
        assert isinstance(read, Batch)
        kept.append((read["lengths"], read["tokens"][:, 7]))
        del read
    assert [(set(lengths.tolist()), set(tokens.tolist())) for lengths, tokens in kept] == [({n}, {n}) for n in range(1, 21)]


@pytest.mark.parametrize("make", [of_ring, of_link])
def test_a_message_that_does_not_fit_is_an_error_and_the_edge_goes_on(make: Callable[[], Edge]) -> None:
    edge = make()
    with pytest.raises(MessageTooLargeError, match=r"does not fit (a slot|an edge)"):
        edge.write(np.zeros(1 << 20))
    edge.write("fits")
    assert edge.read(PATIENCE_S) == "fits"


def test_an_empty_read_sleeps_until_its_deadline(edge: Edge) -> None:
    started, before = time.monotonic(), time.thread_time()
    with pytest.raises(EdgeTimeoutError):
        edge.read(0.2)
    assert 0.2 <= time.monotonic() - started < PATIENCE_S
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
            edge.write(1)
