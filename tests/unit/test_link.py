"""Edges between hosts, over TCP: what is written is read, in order, by the one who knows the edge's secret."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from dagrl.executors.link import POOL, SECRET_BYTES, LinkReader, LinkWriter
from dagrl.executors.memory import EdgeClosedError, EdgeTimeoutError, MessageTooLargeError
from dagrl.executors.packet import Header, Packet
from dagrl.shapes import Batch

LIMIT = 8 << 20
PATIENCE_S = 30.0  # for what takes a moment, on a machine that does other things


def parts(value: object) -> list[bytes | memoryview]:
    buffers: list[pickle.PickleBuffer] = []
    return [pickle.dumps(value, protocol=5, buffer_callback=buffers.append), *(buffer.raw() for buffer in buffers)]


@pytest.fixture
def link() -> Iterator[tuple[LinkWriter, LinkReader]]:
    writer = LinkWriter("127.0.0.1", LIMIT)
    reader = LinkReader(writer.address)
    yield writer, reader
    writer.close()
    reader.close()


Link = tuple[LinkWriter, LinkReader]


def test_messages_of_any_size_arrive_in_order(link: Link) -> None:
    values = [
        1,
        b"x" * 100,
        np.arange(10),
        {"a": np.ones((300, 500)), "b": [np.arange(7.0)]},
        None,
        np.zeros(900_000),
        "end",
    ]
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(lambda: [link[0].write(parts(value), PATIENCE_S) for value in values])
        for value in values:
            np.testing.assert_equal(link[1].read(PATIENCE_S), value)
        done.result()


def test_arrays_may_be_kept_and_memory_of_those_that_are_gone_is_used_again(link: Link) -> None:
    writer, reader = link
    kept, addresses = [], []
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(lambda: [writer.write(parts(np.full(200_000, number)), PATIENCE_S) for number in range(12)])
        for number in range(12):
            array = reader.read(PATIENCE_S)
            if number < 7:
                kept.append(array)
            else:
                addresses.append(array.__array_interface__["data"])  # type: ignore[attr-defined]
            del array
        done.result()
    assert [set(array.tolist()) for array in kept] == [{number} for number in range(7)]  # type: ignore[attr-defined]
    assert len(set(addresses)) == 1
    assert len(reader._pool) == POOL, "what is kept is the keeper's"


def test_the_arrays_of_a_batch_hold_its_memory(link: Link) -> None:
    """Where the reader has nothing of the message but arrays, or views of them."""
    writer, reader = link
    kept = []
    with ThreadPoolExecutor(1) as pool:
        for number in range(1, 13):
            batch = Batch({"lengths": np.full(100, number), "tokens": np.full((100, 1000), number)})
            wire = Packet(Header("train_step", number, False, {"train": 0}, 1.0), batch).wire()
            done = pool.submit(writer.write, parts(wire), PATIENCE_S)
            read = Packet.from_wire(reader.read(PATIENCE_S)).value
            assert isinstance(read, Batch)
            kept.append((read["lengths"], read["tokens"][:, 7]))
            del read
            done.result()
    assert [(set(lengths.tolist()), set(tokens.tolist())) for lengths, tokens in kept] == [({n}, {n}) for n in range(1, 13)]


def test_a_read_that_timed_out_goes_on_where_it_was(link: Link) -> None:
    writer, reader = link
    started = time.monotonic()
    with pytest.raises(EdgeTimeoutError):
        reader.read(0.1)
    assert 0.1 <= time.monotonic() - started < PATIENCE_S
    writer.write(parts("first"), PATIENCE_S)
    assert reader.read(PATIENCE_S) == "first"
    whole = b"".join(parts(np.arange(100_000))[:1])
    assert whole
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(writer.write, parts(np.arange(1_000_000)), PATIENCE_S)
        while True:
            try:
                array = reader.read(0.0)
                break
            except EdgeTimeoutError:
                continue
        done.result()
    np.testing.assert_array_equal(array, np.arange(1_000_000))  # type: ignore[arg-type]


def test_a_reader_that_does_not_come_is_an_error_in_time() -> None:
    writer = LinkWriter("127.0.0.1", LIMIT)
    with pytest.raises(EdgeTimeoutError):
        writer.write(parts(1), 0.1)
    with pytest.raises(EdgeClosedError):
        writer.write(parts(1), 0.1)


def test_a_message_over_the_limit_is_an_error_and_the_link_lives_on(link: Link) -> None:
    writer, reader = link
    with pytest.raises(MessageTooLargeError, match="does not fit an edge"):
        writer.write(parts(np.zeros(LIMIT)), 1.0)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(writer.write, parts("fits"), PATIENCE_S)
        assert reader.read(PATIENCE_S) == "fits"
        done.result()


def test_who_does_not_know_the_secret_is_sent_nothing_and_keeps_nobody_out(link: Link) -> None:
    writer, reader = link
    address = writer.address
    stranger = socket.create_connection((address.host, address.port))
    stranger.sendall(bytes(SECRET_BYTES))
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(writer.write, parts("for the reader alone"), PATIENCE_S)
        assert reader.read(PATIENCE_S) == "for the reader alone"
        done.result()
    stranger.settimeout(PATIENCE_S)
    assert stranger.recv(1) == b""
    with pytest.raises(OSError):
        socket.create_connection((address.host, address.port))


def test_a_reader_unpickles_nothing_from_a_writer_without_the_secret(link: Link) -> None:
    writer = LinkWriter("127.0.0.1", LIMIT)
    reader = LinkReader(replace(writer.address, writer_secret=bytes(SECRET_BYTES)))
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(writer.write, parts("not from my writer"), PATIENCE_S)
        with pytest.raises(EdgeClosedError, match="does not know its secret"):
            reader.read(PATIENCE_S)
        done.result()


@pytest.mark.parametrize("side", ["writer", "reader"])
def test_closing_either_side_wakes_a_reader_that_waits(link: Link, side: str) -> None:
    writer, reader = link
    writing = threading.Thread(target=writer.write, args=(parts(1), PATIENCE_S))
    writing.start()
    assert reader.read(PATIENCE_S) == 1
    writing.join()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            reader.read(600.0)
        except EdgeClosedError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    (writer if side == "writer" else reader).close()
    waiting.join(PATIENCE_S)
    assert errors and not waiting.is_alive()
    with pytest.raises(EdgeClosedError):
        for _ in range(3):  # what the other side's system has in its buffers may still be taken
            writer.write(parts(np.zeros(100_000)), 1.0)


def test_waiting_takes_no_processor_time(link: Link) -> None:
    before = time.thread_time()
    with pytest.raises(EdgeTimeoutError):
        link[1].read(1.0)
    assert time.thread_time() - before < 0.05
