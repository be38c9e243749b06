"""Rings of messages in shared memory: every reader gets every message, in order, in bounded memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.runtime.edges import ring as ring_module
from dagrl.runtime.edges.mailbox import Mailbox
from dagrl.runtime.edges.memory import EdgeClosedError, EdgeTimeoutError
from dagrl.runtime.edges.pickling import dump
from dagrl.runtime.edges.ring import IN_PLACE_BYTES, Ring

SLOT = 1 << 20
PATIENCE_S = 30.0  # for what takes a moment, on a machine that does other things


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring.create(in_flight=2, slot_bytes=SLOT, readers=1)
    yield ring
    ring.close()


def test_views_of_an_array_hold_its_slot(ring: Ring) -> None:
    ring.write(dump(np.full(100_000, 1)), 1.0)
    first = ring.read(0, 1.0)
    address = first.__array_interface__["data"]  # type: ignore[attr-defined]
    view = first[10:20]  # type: ignore[index]
    del first
    gc.collect()
    ring.write(dump(np.full(100_000, 2)), 1.0)
    second = ring.read(0, 1.0)
    assert second.__array_interface__["data"] != address  # type: ignore[attr-defined]
    assert view.tolist() == [1] * 10
    del view, second
    gc.collect()
    ring.write(dump(np.full(100_000, 3)), 1.0)
    third = ring.read(0, 1.0)
    assert third.__array_interface__["data"] == address  # type: ignore[attr-defined]


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
    """Descriptors of this process that are memory of edges."""
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
