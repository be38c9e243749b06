"""Rings and mailboxes in shared memory: every message, in order, in bounded memory; and how long readers spin."""

import gc
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.errors import RunError
from dagrl.runtime.edges import futex, link, ring as ring_module
from dagrl.runtime.edges.futex import Patience
from dagrl.runtime.edges.link import LinkReader, LinkWriter
from dagrl.runtime.edges.mailbox import CELL_BYTES, Mailbox
from dagrl.runtime.edges.memory import EdgeClosedError, EdgeTimeoutError, MessageTooLargeError
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.edges.pickling import dump
from dagrl.runtime.edges.ring import IN_PLACE_BYTES, Ring
from dagrl.runtime.shapes import Batch

SLOT = 1 << 20
PATIENCE_S = 30.0  # for what takes a moment, on a machine that does other things


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring.create(in_flight=2, slot_bytes=SLOT, readers=1)
    yield ring
    ring.close()


def test_views_of_an_array_hold_its_slot(ring: Ring) -> None:
    addresses, view = [], np.zeros(0)
    for number in (1, 2, 3):
        ring.write(dump(np.full(100_000, number)), 1.0)
        array: Any = ring.read(0, 1.0)
        addresses.append(array.__array_interface__["data"])
        assert number != 2 or view.tolist() == [1] * 10
        view = array[10:20] if number == 1 else np.zeros(0)
        del array
        gc.collect()
    first, second, third = addresses
    assert second != first == third


def test_readers_that_keep_messages_do_not_block_the_writer() -> None:
    writer = Ring.create(2, SLOT, 3)
    readers = [Ring.open(writer.address) for _ in range(3)]
    kept: list[list[object]] = [[], [], []]
    for number in range(30):
        writer.write(dump(np.full(50_000, number)), 1.0)
        for place, reader in enumerate(readers):
            value = reader.read(place, 1.0)
            assert not value.flags.writeable or len(kept[place]) >= 2  # type: ignore[attr-defined]
            if number % 3 == place:
                kept[place].append(value)
            del value
    for place, values in enumerate(kept):
        assert [int(value[0]) for value in values] == list(range(place, 30, 3))  # type: ignore[index]


def test_more_messages_than_may_be_in_flight_wait_for_their_readers(ring: Ring) -> None:
    for number in range(4):  # two in flight, and two slots for messages that the reader may keep
        ring.write(dump(number), 1.0)
    with pytest.raises(EdgeTimeoutError, match="has not read"):
        ring.write(dump(4), 0.05)
    assert [ring.read(0, 1.0) for _ in range(4)] == [0, 1, 2, 3]
    ring.write(dump(4), 1.0)
    assert ring.read(0, 1.0) == 4


@pytest.mark.parametrize("copiers", [1, 3, 4])
def test_parts_copied_by_several_threads_are_whole(monkeypatch: pytest.MonkeyPatch, copiers: int) -> None:
    """Sizes that the threads do not divide, and copies of kept messages."""
    monkeypatch.setattr(ring_module, "COPIERS", copiers)
    monkeypatch.setattr(ring_module, "PARALLEL_BYTES", IN_PLACE_BYTES)
    ring_module._copiers.cache_clear()
    ring = Ring.create(2, SLOT, 1)
    sent = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in (100_001, 40_000, 65_536, 99_999)]
    kept = []
    for number, values in enumerate(sent):
        ring.write(dump([values, values[::-1].copy(), number]), 1.0)
        kept.append(ring.read(0, 1.0))
    for number, (values, found) in enumerate(zip(sent, kept, strict=True)):
        np.testing.assert_array_equal(found[0], values)  # type: ignore[index]
        np.testing.assert_array_equal(found[1], values[::-1])  # type: ignore[index]
        assert found[2] == number  # type: ignore[index]
    ring_module._copiers().shutdown()
    ring_module._copiers.cache_clear()


def test_message_numbers_wrap_around() -> None:
    writer = Ring.create(2, SLOT, 1)
    reader = Ring.open(writer.address)
    start = (1 << 32) - 3
    writer.messages_written = reader.messages_read = start
    writer._words[0] = start
    writer._message_of[:] = [start] * len(writer._message_of)
    for slot in range(writer.address.slots):
        writer._acknowledge(0, slot, start)
    for number in range(12):
        writer.write(dump(number), 0.5)
        assert reader.read(0, 0.5) == number


def edge_files() -> int:
    names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum("memfd:dagrl" in os.readlink(name) for name in names if os.path.islink(name))


@pytest.mark.parametrize("make", [lambda: Ring.create(2, SLOT, 1), lambda: Mailbox.create(5, 4)], ids=["ring", "mailbox"])
def test_memory_ends_with_its_processes(make: Callable[[], Any]) -> None:
    gc.collect()
    before = edge_files()
    made = [make() for _ in range(10)]
    assert edge_files() > before
    kind, address = type(made[0]), made[0].address
    del made
    gc.collect()
    assert edge_files() == before
    with pytest.raises(EdgeClosedError, match="cannot be reached"):
        kind.open(address)


def test_a_file_that_reuses_the_descriptor_of_an_edge_is_left_alone(tmp_path: Path) -> None:
    addresses = [Ring.create(2, SLOT, 1).address, Mailbox.create(1, 2).address]
    gc.collect()
    content = bytes(range(256)) * 64
    other = tmp_path / "other"
    other.write_bytes(content)
    files = [os.open(other, os.O_RDWR) for _ in addresses]
    again = Ring.create(2, SLOT, 1)
    try:
        for address, opened in zip(addresses, (Ring.open, Mailbox.open), strict=True):
            for descriptor in (*files, again.address.memory.descriptor):
                with pytest.raises(EdgeClosedError, match="is gone, or has closed it"):
                    opened(replace(address, memory=replace(address.memory, descriptor=descriptor)))  # type: ignore[type-var]
    finally:
        for descriptor in files:
            os.close(descriptor)
    assert other.read_bytes() == content


WRITERS, SLOTS = 5, 4


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


LEAST, MOST = 0.02, 2.0


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(futex.time, "perf_counter", lambda: clock.now)
    for name, value in {"LOST_CORE_S": 1e-3, "GIVE_WAY_S": (LEAST, MOST), "SOON_S": 0.02, "LONG_SPIN_S": 0.02}.items():
        monkeypatch.setattr(futex, name, value)
    monkeypatch.setattr(Patience, "_give_way_until", 0.0)
    monkeypatch.setattr(Patience, "_give_way_s", LEAST)
    return clock


def look(patience: Patience, clock: Clock, seconds: float) -> float:
    before, clock.now = clock.now, clock.now + seconds
    return patience.looked(before)


def came(patience: Patience, clock: Clock, after: float) -> float:
    clock.now += after
    patience.came(clock.now - after)
    return patience.seconds


def test_a_reader_whose_messages_come_soon_spins_for_long(clock: Clock) -> None:
    patience = Patience()
    assert patience.seconds == futex.SHORT_SPIN_S
    assert came(patience, clock, after=0.001) == futex.LONG_SPIN_S
    assert came(patience, clock, after=0.5) == futex.SHORT_SPIN_S
    assert came(patience, clock, after=0.001) == futex.LONG_SPIN_S
    patience.lose()
    assert patience.seconds == futex.SHORT_SPIN_S


def test_losing_the_core_stops_spinning_on_all_edges_of_the_process(clock: Clock) -> None:
    one, other = Patience(), Patience()
    assert look(one, clock, 1e-5) == clock.now
    assert look(one, clock, 0.003) == math.inf
    assert came(other, clock, after=0.001) == futex.SHORT_SPIN_S
    assert came(other, clock, after=LEAST) == futex.LONG_SPIN_S


def test_a_core_lost_repeatedly_is_given_up_for_longer(clock: Clock) -> None:
    patience, given = Patience(), []
    for _ in range(10):
        look(patience, clock, 0.003)
        given.append(Patience._give_way_until - clock.now)
        clock.now = Patience._give_way_until + 0.001
    assert given == pytest.approx([LEAST * 2**turn for turn in range(7)] + [MOST] * 3)
    clock.now += 2 * MOST  # undisturbed for as long as it gave way
    look(patience, clock, 0.003)
    assert Patience._give_way_until - clock.now == pytest.approx(LEAST)


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


@pytest.mark.parametrize("make", [of_ring, partial(of_ring, 2), of_link])  # views of a shared ring are read-only
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
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(edge.read, 600.0)
        time.sleep(0.1)
        edge.ends[end]()
        with pytest.raises(EdgeClosedError):
            waits.result(PATIENCE_S)
    with pytest.raises(EdgeClosedError):
        for _ in range(9):  # what the buffers of a socket have room for may still be taken
            edge.write(1)
