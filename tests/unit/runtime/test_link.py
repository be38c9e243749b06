"""Edges between hosts: a reader with the secret gets every message, in order; and a worker's loop over its edges."""

import gc
import os
import pickle
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dagrl.errors import RunError
from dagrl.runtime.edges.link import POOL, SECRET_BYTES, LinkAddress, LinkReader, LinkWriter, _blocks
from dagrl.runtime.edges.mailbox import CELL_BYTES, Mailbox
from dagrl.runtime.edges.memory import EdgeClosedError, EdgeLostError, EdgeTimeoutError
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.edges.pickling import UnreadableError, dump
from dagrl.runtime.edges.ring import Ring
from dagrl.runtime.executors import edge
from dagrl.runtime.executors.edge import DRIVER, EdgeReader, EdgeSpec, EdgeWriter
from dagrl.runtime.executors.loop import LoopNode, _loops, end_loop, loop_runs, prepare_loop, start_loop
from dagrl.runtime.executors.node import NodeCall, Take, install
from dagrl.runtime.graph import Source
from tests.integration.processes import ends_within
from tests.unit.runtime.doubles import Unreadable

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


# A worker's loop and its edges: silent where an edge was closed, an error where a link was lost.


ROOM = 1 << 18
LOST = r"train worker 3 lost the link (from|to) another host, from 127\.0\.0\.1:\d+ to 127\.0\.0\.1:\d+: "


@pytest.fixture(autouse=True)
def _one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "ray", SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")))


def header(ticket: int) -> Header:
    return Header("phase", ticket, False, {"train": ticket}, 10.0)


def worker() -> Any:
    made = SimpleNamespace(step=lambda *values: values[0] if len(values) == 1 else values, abort=Mock())
    install(made, "train", 3, "")
    return made


def node(number: int, sources: Sequence[Source], spec: EdgeSpec, place: int = 0, last: bool = True) -> LoopNode:
    takes = tuple(Take(index) for index in range(len(sources)))
    call = NodeCall("train", f"train[3].step{number}", 0, "map", "step", takes, {}, place, last, 1 << 20, "", number=number)
    return LoopNode(call, tuple(sources), spec)


class Running:
    """A loop of one worker, and this process as the driver that sends its input and reads its results."""

    def __init__(self, nodes: Sequence[LoopNode], start: EdgeSpec) -> None:
        self.worker, self.name, self.ticket = worker(), uuid.uuid4().hex, 0
        self.start = EdgeWriter(start)
        made = prepare_loop(self.worker, self.name, nodes, None)
        start_loop(self.worker, self.name, 0, {None: self.start.address, **made})
        self.readers = {number: EdgeReader(found, DRIVER) for number, found in made.items()}

    def send(self, value: object) -> None:
        self.start.write(Packet(header(self.ticket), value), PATIENCE_S)
        self.ticket += 1

    def receive(self, number: int = 0) -> Packet:
        return self.readers[number].read(PATIENCE_S)

    def end(self) -> None:
        assert ends_within(PATIENCE_S, lambda: not end_loop(self.worker, self.name))


NEAR = EdgeSpec(ROOM, 2, near=(DRIVER,))
FAR = EdgeSpec(ROOM, 2, far=(DRIVER,))


@pytest.fixture(params=["ring", "link"])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A loop of one node on this host, or between links to another one."""
    far = request.param == "link"
    start = EdgeSpec(ROOM, 2, far=(0,)) if far else EdgeSpec(ROOM, 2, near=(0,))
    loop = Running([node(0, [None], FAR if far else NEAR)], start)
    yield loop
    loop.start.close()


def test_an_unreadable_value_ends_the_loop_and_frees_the_workers_peers(running: Running) -> None:
    running.send(Unreadable())
    with pytest.raises(EdgeClosedError):
        running.receive()
    with pytest.raises(UnreadableError, match="train worker 3: ValueError: cannot be made again, when a value"):
        running.end()
    assert running.worker.abort.call_count == 1


def test_an_unpicklable_result_is_a_failure_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch, running: Running) -> None:
    write = EdgeWriter.write

    def refuse(self: EdgeWriter, packet: Packet, timeout_s: float | None = None) -> None:
        if packet.value == "refused" and self is not running.start:
            raise TypeError("cannot be sent")
        write(self, packet, timeout_s)

    monkeypatch.setattr(EdgeWriter, "write", refuse)
    running.send("refused")
    (failure,) = running.receive().failures
    assert (failure.role, failure.rank, failure.node, failure.phase) == ("train", 3, "train[3].step0", "phase")
    assert failure.message.startswith("TypeError: cannot be sent")
    assert not running.worker.abort.called
    running.send(7)
    assert running.receive().value == 7


@pytest.mark.parametrize("closes", [lambda one: one.start.close(), lambda one: one.readers[0].close(), None])
def test_closing_an_edge_ends_the_loop_silently(closes: Callable[[Running], None] | None) -> None:
    """None: the loop is told to end."""
    running = Running([node(0, [None], NEAR)], EdgeSpec(ROOM, 2, near=(0,)))
    running.send(7)
    assert running.receive().value == 7 and loop_runs(running.worker, running.name)
    if closes is not None:
        closes(running)
        with suppress(EdgeClosedError):
            running.send(8)
    running.end()
    assert not loop_runs(running.worker, running.name)
    with pytest.raises(EdgeClosedError):
        while True:
            running.receive()


@pytest.mark.parametrize("lost", ["input", "output"])
def test_a_lost_link_ends_the_loop_with_an_error_that_names_it(lost: str) -> None:
    running = Running([node(0, [None], FAR)], EdgeSpec(ROOM, 2, far=(0,)))
    running.send(7)
    assert running.receive().value == 7
    if lost == "input":
        cut(running.start._links[0])
    else:
        link = running.readers[0]._link
        assert link is not None
        cut(link)
    until = time.monotonic() + PATIENCE_S
    while loop_runs(running.worker, running.name) and time.monotonic() < until:
        if lost == "output":  # it notices when it writes: what was on its way may still be taken
            with suppress(EdgeClosedError):
                running.send("more")
        time.sleep(0.01)
    with pytest.raises(EdgeLostError, match=LOST) as caught:
        running.end()
    sent = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  # of this process
    assert sent.time_ns == caught.value.time_ns  # type: ignore[attr-defined]
    running.end()  # nothing is left of it


def test_a_loop_that_was_ended_before_it_began_does_not_begin() -> None:
    mine, name = worker(), uuid.uuid4().hex
    made = prepare_loop(mine, name, [node(0, [None], NEAR)], None)
    reader = EdgeReader(made[0], DRIVER)
    assert not loop_runs(mine, name) and end_loop(mine, name) and end_loop(mine, name)
    with pytest.raises(RunError, match="torn down before its loops began"):
        start_loop(mine, name, 0, {})
    with pytest.raises(EdgeClosedError):
        reader.read(1.0)


def test_shared_values_are_read_once_and_own_values_passed_by_reference() -> None:
    keep = EdgeSpec(ROOM, 2)
    nodes = [
        node(0, [None], keep, 0, False),
        node(1, [None, 0, None], keep, 1, False),
        node(2, [0], keep, 2, False),
        node(3, [None], keep, 3, False),
        node(4, [1, 2, 3], NEAR, 4),
    ]
    running = Running(nodes, EdgeSpec(ROOM, 2, near=(0,)))
    for turn in range(5):
        running.send([turn])
        assert running.receive(4).value == (([turn], [turn], [turn]), [turn], [turn])
    running.end()


def test_small_results_of_a_scripts_classes_with_arrays_fit_a_cell() -> None:
    """Sent by value, because the other process cannot import the classes of a script."""
    script: Any = type("Found", (), {"__module__": "__main__"})
    mailbox = Mailbox.create(1, 2)
    writer = EdgeWriter(replace(NEAR, cell=0), mailbox)
    reader = EdgeReader(writer.address, DRIVER)
    for number, size in enumerate((4, 100, CELL_BYTES), start=1):
        found = script()
        found.array = np.arange(size)
        writer.write(Packet(header(0), found), 1.0)
        (message,) = mailbox.collect(number, 1.0)
        assert isinstance(message, tuple) == (size < CELL_BYTES)
        if not isinstance(message, tuple):  # its number in the ring
            message = reader.read_message(int(str(message)), 1.0)
        assert message[0].array.tolist() == list(range(size))


def test_messages_before_the_announced_one_are_dropped() -> None:
    mailbox = Mailbox.create(1, 4)
    writer = EdgeWriter(EdgeSpec(ROOM, 4, near=(DRIVER,), cell=0), mailbox)
    reader = EdgeReader(writer.address, DRIVER)
    large = np.zeros(CELL_BYTES)
    for value in ([large, Unreadable()], [large, "second"], [large, "third"]):
        writer.write(Packet(header(0), value), 1.0)
    for number, word in ((2, "second"), (3, "third")):
        assert reader.read_message(number, 1.0)[0][1] == word


def test_memory_and_ports_end_with_the_loop() -> None:
    running = Running([node(0, [None], EdgeSpec(ROOM, 2, near=(1,), far=(DRIVER,)))], EdgeSpec(ROOM, 2, near=(0,)))
    address = _loops[running.name].writers[0].address
    running.end()
    gc.collect()
    assert address.ring is not None
    with pytest.raises(EdgeClosedError):
        Ring.open(address.ring)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.far[DRIVER].host, address.far[DRIVER].port), timeout=5.0)
