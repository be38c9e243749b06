"""Edges in one process: what a writer announces in a mailbox, and what closing an edge does not touch."""

from __future__ import annotations

import gc
import os
import threading
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dagrl.executors.edge import Edge, EdgeParts, EdgeType, Place, _links, _written, make_mailbox
from dagrl.executors.mailbox import CELL_BYTES, Mailbox
from dagrl.executors.packet import Header, Packet
from dagrl.executors.ring import Ring, RingAddress
from tests.unit.unreadable import unreadable

HEADER = Header("phase", 0, False, {"train": 0}, 10.0)


def edge_of(address: RingAddress, mailbox: Mailbox) -> Edge:
    """An edge from this process to a driver that reads `mailbox`."""
    name, place = uuid.uuid4().hex, Place(mailbox.address, 0)
    return Edge(EdgeParts(name, address, ("driver",), None, {}, None, "driver", place))


def test_small_results_of_a_scripts_classes_with_arrays_fit_a_cell() -> None:
    """By value, as a script's classes are in no module of the other process."""
    script: Any = type("Found", (), {"__module__": "__main__"})
    mailbox, ring = make_mailbox(1, 2), Ring.create(2, 1 << 16, 1)
    edge, driver = edge_of(ring.address, mailbox), Ring.open(ring.address)
    for number, size in enumerate((4, 100, CELL_BYTES), start=1):
        found = script()
        found.array = np.arange(size)
        edge.write(Packet(HEADER, found), 1.0)
        (message,) = mailbox.collect(number, 1.0)
        assert isinstance(message, tuple) == (size < CELL_BYTES)
        if not isinstance(message, tuple):  # its number in the ring
            message = driver.read(0, 1.0)
            assert isinstance(message, tuple)
        assert message[0].array.tolist() == list(range(size))


@pytest.fixture
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a driver, on the host `here`."""
    context = SimpleNamespace(get_actor_id=lambda: None, get_node_id=lambda: "here")
    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setattr("dagrl.executors.edge.ray", SimpleNamespace(get_runtime_context=lambda: context, util=util))


def both_ends() -> tuple[Edge, Edge, Ring]:
    """The writer's of a new edge, the driver's, and the ring that must stay."""
    mailbox, ring = make_mailbox(1, 4), Ring.create(4, 1 << 18, 1)
    writer = edge_of(ring.address, mailbox)
    writer.ensure_registered_as_writer()
    return writer, Edge(replace(writer._parts, name="the driver's")), ring


@pytest.mark.usefixtures("_driver")
def test_messages_before_the_one_that_was_announced_are_dropped_unread() -> None:
    writer, driver, _ring = both_ends()
    large = np.zeros(CELL_BYTES)
    for value in ([large, unreadable()], [large, "second"], [large, "third"]):
        writer.write(Packet(HEADER, value), 1.0)
    for number, word in ((2, "second"), (3, "third")):
        assert driver.read_message(number, 1.0)[0][1] == word


@pytest.mark.usefixtures("_driver")
@pytest.mark.parametrize("timeout", [None, -1.0], ids=str)
def test_rays_ways_to_say_without_end_are_both_known(timeout: float | None) -> None:
    writer, driver, _ring = both_ends()
    writer._mailbox = None  # not announced
    driver.ensure_registered_as_reader()
    later = threading.Timer(0.2, writer.write, [Packet(HEADER, np.arange(CELL_BYTES)), 1.0])
    later.start()
    assert len(driver.read(timeout).value) == CELL_BYTES
    later.join()


@pytest.mark.usefixtures("_driver")
def test_readers_are_told_apart_by_where_they_are() -> None:
    """The writer itself, workers of its host, and of another; only what the driver alone reads is announced to it."""
    writer, near, far, driver = (SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda name=name: name)) for name in "wnfd")
    place = Place(make_mailbox(1, 2).address, 0)
    kind = EdgeType(1 << 16, 2, place)
    edges = [
        kind.create_channel(writer, readers, None)
        for readers in (
            [(writer, "here"), (near, "here"), (far, "there")],
            [(writer, "here")],
            [(driver, "here"), (near, "here")],
            [(driver, "here")],
        )
    ]
    try:
        all_kinds, own, shared, drivers = (edge._parts for edge in edges)
        assert (all_kinds.readers, list(all_kinds.far), all_kinds.own is None) == (("n",), ["f"], False)
        assert (own.readers, own.address, own.own is None, own.place) == ((), None, False, None)
        assert (shared.readers, shared.own, shared.place) == (("d", "n"), None, None)
        assert (drivers.readers, drivers.place) == (("d",), place)
    finally:
        for edge in edges:
            edge.close()
    names = {edge._parts.name for edge in edges}
    assert not names & _written.keys() and not names & _links.keys(), "the memory and ports of an edge end with it"


def test_closing_an_edge_leaves_a_file_alone_that_has_its_descriptor_by_now(tmp_path: Path) -> None:
    mailbox, ring = Mailbox.create(1, 2), Ring.create(2, 1 << 16, 1)
    content = bytes(1 << 18)
    other = tmp_path / "other"
    other.write_bytes(content)
    descriptor = os.open(other, os.O_RDWR)
    memory = replace(ring.address.memory, descriptor=descriptor)
    try:
        edge = edge_of(replace(ring.address, memory=memory), mailbox)
        del ring
        gc.collect()
        edge.close()
    finally:
        os.close(descriptor)
    assert other.read_bytes() == content
