"""The edges of a compiled graph: Ray's channel interface over shared-memory rings.

An edge has one writer and readers of three kinds: the writer itself (the value is passed by reference), workers on its host
(one ring for all of them), and workers on other hosts (one TCP link each). Ray's own channels are not used because they
poll, one core per live graph on every worker (see `futex`), grow by leaking shared memory, and leave semaphores in
`/dev/shm`.

Ray makes edges through `ChannelOutputType.create_channel` in the writer's process and sends them pickled to the driver and
the readers. Each of these opens the edge's memory when it first uses it.
"""

from __future__ import annotations

import pickle
import uuid
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayChannelError, RayChannelTimeoutError
from ray.experimental.channel import ChannelOutputType, IntraProcessChannel
from ray.experimental.channel.common import ChannelInterface

from dagrl.runtime.edges.link import LinkAddress, LinkReader, LinkWriter
from dagrl.runtime.edges.mailbox import CELL_BYTES, Mailbox, MailboxAddress
from dagrl.runtime.edges.memory import EdgeClosedError, EdgeLostError, EdgeTimeoutError
from dagrl.runtime.edges.packet import PLAIN_TYPES, Packet, wire_body
from dagrl.runtime.edges.pickling import dump
from dagrl.runtime.edges.ring import Ring, RingAddress
from dagrl.runtime.edges.tls import TlsFiles

_open: weakref.WeakValueDictionary[object, Any] = weakref.WeakValueDictionary()
"""The rings and mailboxes that this process has open, and the links that it reads, by their addresses."""

_links: dict[str, list[LinkWriter]] = {}
"""The links that this process writes, by the name of their edge, until they are closed."""

_written: dict[str, Ring] = {}
"""Keeps the rings that this process writes alive until they are closed: readers open them through this process."""


Opened = TypeVar("Opened", Ring, Mailbox, LinkReader)


@dataclass(frozen=True)
class MailboxSlot:
    """The slot of one writer in a mailbox."""

    mailbox: MailboxAddress
    writer: int


@dataclass(eq=False)
class EdgeType(ChannelOutputType):  # type: ignore[misc]  # Ray has no types
    """The type hint of a node whose result is sent over edges with `in_flight` messages of up to `slot_bytes` bytes."""

    slot_bytes: int
    in_flight: int
    mailbox_slot: MailboxSlot | None = None  # in the driver's mailbox, for a node that only the driver reads
    tls: TlsFiles | None = None  # files that encrypt messages between hosts

    def create_channel(
        self, writer: Any, reader_and_node_list: list[tuple[Any, str]], driver_actor_id: str | None = None
    ) -> Edge:
        """Returns an edge from this process to the readers. `driver_actor_id`: set if the driver is an actor itself."""
        here = ray.get_runtime_context().get_node_id()
        others = [(reader, node) for reader, node in reader_and_node_list if reader != writer]
        near = [_actor_id(reader) for reader, node in others if node == here]
        far = [_actor_id(reader) for reader, node in others if node != here]
        name = uuid.uuid4().hex
        if near:
            ring = _written[name] = Ring.create(self.in_flight, self.slot_bytes, len(near))
            _open[ring.address] = ring
        if far:
            here_ip = ray.util.get_node_ip_address()
            _links[name] = [LinkWriter(here_ip, self.slot_bytes, self.in_flight, self.tls) for _ in far]
        description = EdgeDescription(
            name=name,
            address=_written[name].address if near else None,
            readers=tuple(near),
            own=IntraProcessChannel(num_readers=1) if len(others) < len(reader_and_node_list) else None,
            far={reader: link.address for reader, link in zip(far, _links.get(name, []), strict=True)},
            driver=driver_actor_id,
            first_reader=_actor_id(reader_and_node_list[0][0]),
            mailbox_slot=self.mailbox_slot if near and len(reader_and_node_list) == 1 else None,
        )
        return Edge(description)


@dataclass(frozen=True)
class EdgeDescription:
    """What every process knows of an edge. Readers are identified by the ids of their actors."""

    name: str
    address: RingAddress | None  # address of its ring, if it has readers on the writer's host
    readers: tuple[str, ...]  # of the ring
    own: IntraProcessChannel | None  # set if the writer reads it too
    far: Mapping[str, LinkAddress]  # by reader on another host
    driver: str | None
    first_reader: str
    mailbox_slot: MailboxSlot | None  # where messages are announced; None: they are read only from the edge


class Edge(ChannelInterface):  # type: ignore[misc]
    """One process's view of an edge."""

    def __init__(self, description: EdgeDescription) -> None:
        self.description = description
        self._own = description.own
        self._is_writer = False
        self._senders: list[Ring | LinkWriter] = []
        self._ring: Ring | None = None
        self._mailbox: Mailbox | None = None
        self._posted = 0
        self._reader = -1
        self._read_from: Any = None

    @property
    def mailbox_slot(self) -> MailboxSlot | None:
        return self.description.mailbox_slot

    @property
    def lost(self) -> EdgeLostError | None:
        """The error of a lost link, if a link ended that this process did not close."""
        links = [end for end in (*self._senders, self._read_from) if isinstance(end, LinkReader | LinkWriter)]
        return next((link.lost for link in links if link.lost is not None), None)

    def __reduce__(self) -> Any:
        return Edge, (self.description,)

    def ensure_registered_as_writer(self) -> None:
        """Opens what this process writes to. Raises RayChannelError if its other end is gone."""
        with rays_errors:
            if self._ring is None and self.description.address is not None:
                self._ring = _opened(self.description.address, Ring.open)
            if self._mailbox is None and self.mailbox_slot is not None:
                self._mailbox = _opened(self.mailbox_slot.mailbox, Mailbox.open)
        self._senders = [*([self._ring] if self._ring is not None else []), *_links.get(self.description.name, [])]
        self._is_writer = True

    def ensure_registered_as_reader(self) -> None:
        """Opens what this process reads from. Raises RayChannelError if its writer is gone."""
        me = ray.get_runtime_context().get_actor_id()
        if me is None or me == self.description.driver:  # Ray lists the driver first, as an actor that represents it
            me = self.description.first_reader
        readers, far = self.description.readers, self.description.far
        if me in readers:
            self._reader = readers.index(me)
            with rays_errors:
                self._ring = self._read_from = self._ring or _opened(self.description.address, Ring.open)
        else:
            self._read_from = _opened(far[me], LinkReader) if me in far else self._own

    def write(self, value: Any, timeout: float | None = None) -> None:
        """Sends a packet (or an error of Ray's) to every reader.

        Raises RayChannelTimeoutError if a reader does not make room in time, RayChannelError if the edge was closed.
        """
        if not self._is_writer:
            self.ensure_registered_as_writer()
        packet = type(value) is Packet
        plain = packet and type(value.value) in PLAIN_TYPES
        with rays_errors:
            if self._mailbox is not None:
                self._post(self._mailbox, wire_body(value) if packet else value, plain, _limit(timeout))
            elif self._senders:
                parts = dump(value.wire() if packet else value, plain=plain)
                for sender in self._senders:
                    sender.write(parts, _limit(timeout))
        if self._own is not None:
            self._own.write(value, timeout)

    def read(self, timeout: float | None = None) -> Any:
        """Returns the next packet. Large arrays may be views of shared memory, read-only if there are more readers.

        Raises UnreadableError if this process cannot unpickle the value; the next read returns the next packet.
        """
        if self._read_from is None:
            self.ensure_registered_as_reader()
        source, ring, own = self._read_from, self._ring, self._own
        if own is not None and source is own:
            return own.read(timeout)
        with rays_errors:
            if ring is not None and source is ring:
                content = ring.read(self._reader, _limit(timeout))
            else:
                content = source.read(_limit(timeout))
        return Packet.from_wire(content) if type(content) is tuple else content

    def read_message(self, number: int, timeout_s: float) -> Any:
        """Returns message `number` of the ring, which the mailbox announced. Drops earlier ones."""
        if self._read_from is None:
            self.ensure_registered_as_reader()
        assert self._ring is not None
        while self._ring.messages_read < number - 1:
            self._ring.skip(self._reader, timeout_s)
        assert self._ring.messages_read == number - 1, "a message is read once"
        return self._ring.read(self._reader, timeout_s)

    def _post(self, mailbox: Mailbox, content: Any, plain: bool, timeout_s: float | None) -> None:
        ring = self._ring
        assert self.mailbox_slot is not None and ring is not None
        parts = dump(content, plain=plain)
        if len(parts) > 1 and sum(map(len, parts)) < CELL_BYTES:
            parts = dump(content, True, plain)
        if len(parts) > 1 or len(parts[0]) > CELL_BYTES:
            ring.write(parts, timeout_s)
            parts = [pickle.dumps(ring.messages_written)]
        self._posted += 1
        mailbox.post(self.mailbox_slot.writer, self._posted, bytes(parts[0]), timeout_s)

    def release_buffer(self, timeout: float | None = None) -> None:
        if self._read_from is None:
            self.ensure_registered_as_reader()
        if self._own is not None and self._read_from is self._own:
            self._own.release_buffer(timeout)
        else:
            self.read(timeout)

    def close(self) -> None:
        """Closes the edge for all its processes."""
        if self.description.address is not None:
            with suppress(EdgeClosedError):  # its writer is gone, and Ray tells its readers
                (self._ring or _opened(self.description.address, Ring.open)).close()
            _written.pop(self.description.name, None)
        if self.mailbox_slot is not None:
            with suppress(EdgeClosedError):  # the driver is gone
                _opened(self.mailbox_slot.mailbox, Mailbox.open).close()
        for writer in _links.pop(self.description.name, []):
            writer.close()
        for address in self.description.far.values():
            if (reader := _open.get(address)) is not None:
                reader.close()
        if self._own is not None:
            self._own.close()


def _opened(address: Any, opens: Callable[[Any], Opened]) -> Opened:
    """Returns what is at an address, which this process opens once. Raises EdgeClosedError if its process is gone."""
    found: Opened | None = _open.get(address)
    if found is None:
        found = _open[address] = opens(address)
    return found


def make_mailbox(writers: int, slots: int) -> Mailbox:
    """Creates a mailbox that this process reads."""
    mailbox = Mailbox.create(writers, slots)
    _open[mailbox.address] = mailbox
    return mailbox


class _RaysErrors:
    """Translates errors of edges into Ray's. A generator-based context manager would take 1 us more per message."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EdgeTimeoutError):
            raise RayChannelTimeoutError(str(error)) from error
        if isinstance(error, EdgeClosedError):
            raise RayChannelError(str(error)) from error


rays_errors = _RaysErrors()


def _actor_id(actor: Any) -> str:
    return str(actor._actor_id.hex())


def _limit(timeout: float | None) -> float | None:
    return None if timeout is None or timeout < 0 else timeout
