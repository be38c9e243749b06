"""Edges between hosts, over TCP: a reader with the edge's secret gets every message, in order."""

import gc
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dagrl.runtime.edges.link import POOL, SECRET_BYTES, LinkAddress, LinkReader, LinkWriter, _blocks
from dagrl.runtime.edges.memory import EdgeClosedError, EdgeLostError, EdgeTimeoutError
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.edges.pickling import dump

LIMIT = 32 << 20
IN_FLIGHT = 2
LARGE = 16 << 20  # more than the buffers of a socket hold
PATIENCE_S = 30.0  # for what takes a moment, on a machine that does other things


@pytest.fixture
def link() -> Iterator[tuple[LinkWriter, LinkReader]]:
    writer = LinkWriter("127.0.0.1", LIMIT, IN_FLIGHT)
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
        [np.full(100, number) for number in range(700)],  # more parts than the system takes at once
        *(np.full(size, 7, np.uint8) for size in np.random.default_rng(0).choice([1, 1000, 100_000, 5_000_000], 40)),
    ]  # sent at once, and later by a thread
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(lambda: [link[0].write(dump(value), PATIENCE_S) for value in values])
        for value in values:
            np.testing.assert_equal(link[1].read(PATIENCE_S), value)
        done.result()
    assert gone(senders()), "a thread ends with what it sends"


def test_arrays_may_be_kept_and_memory_of_freed_ones_is_reused(link: Link) -> None:
    writer, reader = link
    kept, addresses = [], set()
    for number in range(12):
        writer.write(dump(np.full(200_000, number)), PATIENCE_S)
        array: Any = reader.read(PATIENCE_S)
        if number < 7:
            kept.append(array)
        else:
            addresses.add(array.__array_interface__["data"])
        del array
    assert [set(array.tolist()) for array in kept] == [{number} for number in range(7)]
    assert len(addresses) == 1
    assert len(reader._pool) == POOL, "what is kept is the keeper's"


def test_a_read_that_timed_out_resumes(link: Link) -> None:
    writer, reader = link
    with pytest.raises(EdgeTimeoutError):
        reader.read(0.1)
    writer.write(dump("first"), PATIENCE_S)
    assert reader.read(PATIENCE_S) == "first"
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(writer.write, dump(np.arange(1_000_000)), PATIENCE_S)
        array: Any = None
        while array is None:
            with suppress(EdgeTimeoutError):
                array = reader.read(0.0)
        done.result()
    np.testing.assert_array_equal(array, np.arange(1_000_000))


def test_two_links_written_before_they_are_read_do_not_deadlock() -> None:
    """All in one thread, so every write comes before every read, as between pipeline stages with two replays in flight."""
    writers = [LinkWriter("127.0.0.1", LIMIT, IN_FLIGHT) for _ in range(2)]
    readers = [LinkReader(writer.address) for writer in writers]
    for _ in range(2):  # before the readers have connected, and afterwards
        for number in range(IN_FLIGHT):
            for side, writer in enumerate(writers):
                writer.write(dump(np.full(LARGE, 10 * number + side, np.uint8)), PATIENCE_S)
        for number in range(IN_FLIGHT):
            for side, reader in enumerate(readers):
                array = reader.read(PATIENCE_S)
                assert isinstance(array, np.ndarray) and array.shape == (LARGE,) and (array == 10 * number + side).all()
                del array
    for end in (*writers, *readers):
        end.close()


def test_written_buffers_may_be_changed_afterwards(link: Link) -> None:
    writer, reader = link
    array = np.ones(LARGE, np.uint8)
    writer.write(dump(array), PATIENCE_S)
    array[:] = 2
    assert (reader.read(PATIENCE_S) == np.ones(LARGE, np.uint8)).all()  # type: ignore[attr-defined]


def test_a_write_waits_for_room_until_its_deadline(link: Link) -> None:
    """The reader has not connected at first. Unsent messages must not pile up."""
    writer, reader = link
    for number in range(IN_FLIGHT):
        writer.write(dump(number), PATIENCE_S)
    started = time.monotonic()
    with pytest.raises(EdgeTimeoutError, match="unconnected reader"):
        writer.write(dump("too many"), 0.1)
    assert 0.1 <= time.monotonic() - started < PATIENCE_S
    assert [reader.read(PATIENCE_S) for _ in range(IN_FLIGHT)] == list(range(IN_FLIGHT))
    writer.write(dump("after"), PATIENCE_S)
    assert reader.read(PATIENCE_S) == "after"


def unread(link: Link, messages: int = IN_FLIGHT) -> None:
    """Fills a link whose reader has connected and reads no more."""
    writer, reader = link
    writer.write(dump("come"), PATIENCE_S)
    assert reader.read(PATIENCE_S) == "come"
    for _ in range(messages):
        writer.write(dump(np.zeros(LARGE, np.uint8)), PATIENCE_S)


def senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dagrl-link"]


def gone(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(PATIENCE_S)
    return not any(thread.is_alive() for thread in threads)


def cut(end: LinkWriter | LinkReader, killed: bool = False) -> None:
    """Ends a connection without calling the object at its end. `killed`: as if its process was killed."""
    assert end._socket is not None
    end._socket.close() if killed else end._socket.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("killed", [False, True], ids=["shut", "killed"])
@pytest.mark.parametrize("waits", [False, True], ids=["writes later", "waits for room"])
def test_a_reader_that_is_gone_is_an_error_that_names_both_ends(link: Link, waits: bool, killed: bool) -> None:
    writer, reader = link
    unread(link)
    threads, (host, port) = senders(), (writer.address.host, writer.address.port)
    assert threads
    with ThreadPoolExecutor(1) as pool:
        if waits:
            done = pool.submit(writer.write, dump(1), None)
            time.sleep(0.1)
            cut(reader, killed)
        else:
            cut(reader, killed)
            assert gone(threads)
            done = pool.submit(writer.write, dump(1), None)
        with pytest.raises(EdgeLostError, match=rf"from {host}:{port} to 127\.0\.0\.1:\d+: "):
            done.result(PATIENCE_S)
    assert gone(threads) and writer.lost is not None and not writer._unsent
    with pytest.raises(EdgeLostError):
        writer.write(dump(1), PATIENCE_S)


def test_a_writer_that_is_gone_is_an_error_that_names_both_ends(link: Link) -> None:
    writer, reader = link
    unread(link, 0)
    cut(writer)
    with pytest.raises(EdgeLostError, match=rf"from 127\.0\.0\.1:{writer.address.port} to 127\.0\.0\.1:\d+: the writer"):
        reader.read(PATIENCE_S)
    assert reader.lost is not None


@pytest.mark.parametrize("connected", [False, True], ids=["reader never connects", "reader does not read"])
def test_closing_ends_the_thread_and_pending_calls_without_a_loss(connected: bool) -> None:
    writer = LinkWriter("127.0.0.1", LIMIT, IN_FLIGHT)
    reader = LinkReader(writer.address)
    if connected:
        unread((writer, reader))
    else:
        for _ in range(IN_FLIGHT):
            writer.write(dump(1), PATIENCE_S)
    threads = senders()
    assert threads and all(thread.daemon for thread in threads), "they do not keep the process"
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(writer.write, dump(1), None)
        time.sleep(0.1)
        writer.close()
        with pytest.raises(EdgeClosedError) as caught:
            done.result(PATIENCE_S)
    assert gone(threads) and type(caught.value) is EdgeClosedError and writer.lost is None and not writer._unsent


def test_links_that_are_closed_leave_no_threads_and_no_sockets() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for messages in (0, 1, IN_FLIGHT):
        writer = LinkWriter("127.0.0.1", LIMIT, IN_FLIGHT)
        reader = LinkReader(writer.address)
        unread((writer, reader), messages)
        writer.close()
        reader.close()
    assert gone(senders())
    del writer, reader
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_dead_host_is_noticed_within_a_minute(link: Link) -> None:
    unread(link, 0)
    for end in link:
        assert end._socket is not None and end._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        silence_s, probe_s, probes = [end._socket.getsockopt(socket.IPPROTO_TCP, name) for name in names]
        assert silence_s + probe_s * probes == 60


def test_a_process_without_the_secret_gets_nothing(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = link
    monkeypatch.setattr("dagrl.runtime.edges.link._STRANGER_S", 0.3)
    address = writer.address
    stranger = socket.create_connection((address.host, address.port))
    stranger.sendall(bytes(SECRET_BYTES))
    writer.write(dump("for the reader alone"), PATIENCE_S)
    assert reader.read(PATIENCE_S) == "for the reader alone"
    stranger.settimeout(PATIENCE_S)
    assert stranger.recv(1) == b""
    with pytest.raises(OSError):
        socket.create_connection((address.host, address.port))


def test_a_stranger_that_sends_slowly_does_not_block_the_reader(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = link
    monkeypatch.setattr("dagrl.runtime.edges.link._STRANGER_S", 0.3)
    over = threading.Event()
    stranger = socket.create_connection((writer.address.host, writer.address.port))

    def drip() -> None:
        with stranger, suppress(OSError):
            while not over.wait(0.1):
                stranger.send(b"x")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(drip)
        writer.write(dump("value"), 1.0)
        assert reader.read(5.0) == "value"
        over.set()


def test_a_reader_unpickles_nothing_from_a_writer_without_the_secret(link: Link) -> None:
    writer = LinkWriter("127.0.0.1", LIMIT, IN_FLIGHT)
    reader = LinkReader(replace(writer.address, writer_secret=bytes(SECRET_BYTES)))
    writer.write(dump("not from my writer"), PATIENCE_S)
    with pytest.raises(EdgeClosedError, match="does not know its secret"):
        reader.read(PATIENCE_S)


def read_from_a_writer(raw: bytes) -> object:
    """Reads from a writer that knows the secret, sends `raw` and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = LinkAddress("127.0.0.1", listening.getsockname()[1], limit=1 << 20)
        reader = LinkReader(address)

        def send() -> None:
            found, _ = listening.accept()
            with found:
                found.recv(SECRET_BYTES)
                found.sendall(address.writer_secret + raw)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(send)
            try:
                return reader.read(PATIENCE_S)
            finally:
                reader.close()


NO_MESSAGE = r"changed on the way|came over an edge|gone|reset"


@settings(deadline=None, max_examples=20)
@given(prefix=st.integers(0, 2**64 - 1) | st.integers(0, 600), body=st.binary(max_size=600), whole=st.booleans())
def test_garbage_ends_the_link_without_allocating_its_claimed_size(prefix: int, body: bytes, whole: bool) -> None:
    """Sizes beyond the edge, parts beyond the message, and an end in the middle."""
    head = (len(body) if whole else prefix).to_bytes(8, "little") + bytes(4)
    with pytest.raises(EdgeLostError, match=NO_MESSAGE):
        read_from_a_writer(head + body)


PACKET = Packet(Header("phase", 7, True, {"train": (1, 2)}, 10.0), {"loss": 0.5, "rows": bytearray(9)}, 0.5)
MESSAGE = b"".join(_blocks(dump(PACKET.wire())))


@settings(deadline=None, max_examples=30)
@given(at=st.integers(0, len(MESSAGE) - 1), bit=st.integers(0, 7), cut=st.booleans())
def test_a_packet_cut_or_changed_at_any_bit_is_not_unpickled(at: int, bit: int, cut: bool) -> None:
    """One with a changed size in its pickle would take gigabytes. Only bits between its parts may differ."""
    changed = MESSAGE[:at] if cut else MESSAGE[:at] + bytes([MESSAGE[at] ^ (1 << bit)]) + MESSAGE[at + 1 :]
    try:
        assert read_from_a_writer(changed) == PACKET.wire() and MESSAGE[at] == 0
    except EdgeLostError as error:
        assert re.search(NO_MESSAGE, str(error))
