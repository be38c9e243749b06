"""Edges in one process: what a writer announces in a mailbox, and what closing an edge leaves alone."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayChannelError

from dagrl.runtime.edges.mailbox import CELL_BYTES, Mailbox
from dagrl.runtime.edges.memory import EdgeClosedError
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.edges.ring import Ring, RingAddress
from dagrl.runtime.executors.edge import Edge, EdgeDescription, EdgeType, MailboxSlot, make_mailbox
from tests.unit.runtime.unreadable import unreadable

HEADER = Header("phase", 0, False, {"train": 0}, 10.0)


def edge_of(address: RingAddress, mailbox: Mailbox | None) -> Edge:
    """An edge from this process to a driver, which reads `mailbox`, or the edge alone."""
    slot = None if mailbox is None else MailboxSlot(mailbox.address, 0)
    return Edge(EdgeDescription(uuid.uuid4().hex, address, ("driver",), None, {}, None, "driver", slot))


def test_small_results_of_a_scripts_classes_with_arrays_fit_a_cell() -> None:
    """Sent by value, because the other process cannot import the classes of a script."""
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
    monkeypatch.setattr("dagrl.runtime.executors.edge.ray", SimpleNamespace(get_runtime_context=lambda: context, util=util))


def both_ends(announced: bool = True) -> tuple[Edge, Edge, object]:
    """The writer's end of a new edge, the driver's end, and memory that the caller keeps alive."""
    mailbox, ring = make_mailbox(1, 4) if announced else None, Ring.create(4, 1 << 18, 1)
    writer = edge_of(ring.address, mailbox)
    writer.ensure_registered_as_writer()
    return writer, Edge(replace(writer.description, name="the driver's")), (mailbox, ring)


@pytest.mark.usefixtures("_driver")
def test_messages_before_the_announced_one_are_dropped() -> None:
    writer, driver, _kept = both_ends()
    large = np.zeros(CELL_BYTES)
    for value in ([large, unreadable()], [large, "second"], [large, "third"]):
        writer.write(Packet(HEADER, value), 1.0)
    for number, word in ((2, "second"), (3, "third")):
        assert driver.read_message(number, 1.0)[0][1] == word


@pytest.mark.usefixtures("_driver")
@pytest.mark.parametrize("timeout", [None, -1.0], ids=str)
def test_both_of_rays_infinite_timeouts_are_known(timeout: float | None) -> None:
    writer, driver, _kept = both_ends(announced=False)
    driver.ensure_registered_as_reader()
    later = threading.Timer(0.2, writer.write, [Packet(HEADER, np.arange(CELL_BYTES)), 1.0])
    later.start()
    assert len(driver.read(timeout).value) == CELL_BYTES
    later.join()


@pytest.mark.usefixtures("_driver")
def test_a_process_that_ended_before_its_edge_was_opened_is_rays_error() -> None:
    """As later, when a worker dies: the failure then names the worker."""
    ring = Ring.create(2, 1 << 12, 1)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    edge = edge_of(replace(ring.address, memory=replace(ring.address.memory, pid=ended.pid)), None)
    for opens in (edge.read, edge.ensure_registered_as_reader, edge.ensure_registered_as_writer):
        with pytest.raises(RayChannelError, match=f"the process {ended.pid} that made this memory cannot be reached"):
            opens()


@pytest.mark.usefixtures("_driver")
def test_readers_are_told_apart_by_where_they_are() -> None:
    """The writer itself, workers on its host and on another one. Only edges that the driver alone reads use its mailbox."""
    writer, near, far, driver = (SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda name=name: name)) for name in "wnfd")
    slot = MailboxSlot(make_mailbox(1, 2).address, 0)
    kind = EdgeType(1 << 16, 2, slot)
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
        all_kinds, own, shared, drivers = (edge.description for edge in edges)
        assert (all_kinds.readers, list(all_kinds.far), all_kinds.own is None) == (("n",), ["f"], False)
        assert (own.readers, own.address, own.own is None, own.mailbox_slot) == ((), None, False, None)
        assert (shared.readers, shared.own, shared.mailbox_slot) == (("d", "n"), None, None)
        assert (drivers.readers, drivers.mailbox_slot) == (("d",), slot)
    finally:
        for edge in edges:
            edge.close()
    gc.collect()
    for edge in edges:  # its memory and ports end with it
        if edge.description.address is not None:
            with pytest.raises(EdgeClosedError):
                Ring.open(edge.description.address)
        for link in edge.description.far.values():
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((link.host, link.port), timeout=5.0)


def test_closing_an_edge_leaves_alone_a_file_that_reuses_its_descriptor(tmp_path: Path) -> None:
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
