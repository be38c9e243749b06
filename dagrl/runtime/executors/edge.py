"""The edges of a graph in dagrl's engine: how one process sends its packets to all that read them.

An edge has one writer. Readers on its host share one ring in shared memory, readers on other hosts have a TCP link each, and
a small result that only the driver reads is posted to its mailbox. (`loop.py` passes a value that the writer itself reads by
reference.) Ray's own channels poll, one core per live graph on every worker (see `futex`), grow by leaking shared memory,
and leave semaphores in `/dev/shm`.

An edge that is closed ends everything that waits on it, in all of its processes.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from dagrl.runtime.edges.link import LinkAddress, LinkReader, LinkWriter
from dagrl.runtime.edges.mailbox import CELL_BYTES, Mailbox
from dagrl.runtime.edges.memory import EdgeLostError
from dagrl.runtime.edges.packet import PLAIN_TYPES, Packet, wire_body
from dagrl.runtime.edges.pickling import dump
from dagrl.runtime.edges.ring import Ring, RingAddress

Reader = int  # a reader: the number of its actor in the graph, or `DRIVER`

DRIVER: Reader = -1


@dataclass(frozen=True)
class EdgeSpec:
    """The parameters of an edge: `in_flight` messages of up to `slot_bytes` bytes; `near` and `far`: readers by their host.

    `cell`: its place in the driver's mailbox, if only the driver reads it.
    """

    slot_bytes: int
    in_flight: int
    near: tuple[Reader, ...] = ()
    far: tuple[Reader, ...] = ()
    cell: int | None = None


@dataclass(frozen=True)
class EdgeAddress:
    """The address of an edge for its readers: their ring, in this order, or the link of each."""

    ring: RingAddress | None
    near: tuple[Reader, ...]
    far: Mapping[Reader, LinkAddress]


class EdgeWriter:
    """The writing end, which makes the edge. `mailbox`: the driver's, for an edge with a `cell`."""

    def __init__(self, spec: EdgeSpec, mailbox: Mailbox | None = None) -> None:
        self._ring = Ring.create(spec.in_flight, spec.slot_bytes, len(spec.near)) if spec.near else None
        host = ray.util.get_node_ip_address() if spec.far else ""
        self._links = {reader: LinkWriter(host, spec.slot_bytes, spec.in_flight) for reader in spec.far}
        self._senders: list[Ring | LinkWriter] = [*([] if self._ring is None else [self._ring]), *self._links.values()]
        self._mailbox, self._cell = None if spec.cell is None else mailbox, spec.cell
        self._posted = 0
        links = {reader: link.address for reader, link in self._links.items()}
        self.address = EdgeAddress(None if self._ring is None else self._ring.address, spec.near, links)

    def write(self, packet: Packet, timeout_s: float | None = None) -> None:
        """Sends a packet to every reader.

        Raises EdgeTimeoutError if a reader does not make room in time, EdgeClosedError if the edge was closed.
        """
        plain = type(packet.value) in PLAIN_TYPES
        if self._mailbox is not None:
            self._post(self._mailbox, wire_body(packet), plain, timeout_s)
            return
        parts = dump(packet.wire(), plain=plain)
        for sender in self._senders:
            sender.write(parts, timeout_s)

    def _post(self, mailbox: Mailbox, content: Any, plain: bool, timeout_s: float | None) -> None:
        ring = self._ring
        assert self._cell is not None and ring is not None
        parts = dump(content, plain=plain)
        if len(parts) > 1 and sum(map(len, parts)) < CELL_BYTES:
            parts = dump(content, True, plain)
        if len(parts) > 1 or len(parts[0]) > CELL_BYTES:
            ring.write(parts, timeout_s)
            parts = [pickle.dumps(ring.messages_written)]
        self._posted += 1
        mailbox.post(self._cell, self._posted, bytes(parts[0]), timeout_s)

    @property
    def lost(self) -> EdgeLostError | None:
        """The error of a link that ended although this process did not close it."""
        return next((link.lost for link in self._links.values() if link.lost is not None), None)

    def close(self) -> None:
        """Closes the edge, and the mailbox that it posts to, for all their processes."""
        for sender in (*self._senders, *([] if self._mailbox is None else [self._mailbox])):
            sender.close()


class EdgeReader:
    """A reading end. `reader`: who reads. Raises EdgeClosedError if the writer is gone."""

    def __init__(self, address: EdgeAddress, reader: Reader) -> None:
        self._place = address.near.index(reader) if reader in address.near else -1
        self._link = None if self._place >= 0 else LinkReader(address.far[reader])
        self._ring = Ring.open(address.ring) if self._place >= 0 and address.ring is not None else None

    def read(self, timeout_s: float | None = None) -> Packet:
        """Returns the next packet. Large arrays may be views of shared memory, read-only if there are more readers.

        Raises EdgeTimeoutError; EdgeClosedError; UnreadableError if this process cannot unpickle the value.
        """
        if self._ring is not None:
            return Packet.from_wire(self._ring.read(self._place, timeout_s))
        assert self._link is not None
        return Packet.from_wire(self._link.read(timeout_s))

    def read_message(self, number: int, timeout_s: float) -> Any:
        """Returns message `number` of the ring, which the mailbox announced. Drops earlier ones."""
        assert self._ring is not None
        while self._ring.messages_read < number - 1:
            self._ring.skip(self._place, timeout_s)
        assert self._ring.messages_read == number - 1, "a message is read once"
        return self._ring.read(self._place, timeout_s)

    @property
    def lost(self) -> EdgeLostError | None:
        """The error of a link that ended although this process did not close it."""
        return None if self._link is None else self._link.lost

    def close(self) -> None:
        """Closes the edge for all its processes."""
        for end in (self._ring, self._link):
            if end is not None:
                end.close()
