"""Edges in one process: what a writer announces in a mailbox, and what closing an edge does not touch."""

from __future__ import annotations

import gc
import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dagrl.executors.edge import Edge, EdgeParts, Place, make_mailbox
from dagrl.executors.mailbox import CELL_BYTES, Mailbox
from dagrl.executors.packet import Header, Packet
from dagrl.executors.ring import Ring, RingAddress

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
