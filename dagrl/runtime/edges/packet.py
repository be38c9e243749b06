"""Packets on the edges of a graph: a value, its replay, and the failures on the way.

A worker's exception is carried as data and not raised inside Ray. So the graph stays alive, every node still takes its turn,
and the driver gets one `WorkerFailure` for each worker that failed.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from ray import ObjectRef

from dagrl.errors import WorkerFailure
from dagrl.runtime.edges.pickling import Encoded, Shares, is_tensor, make_torch_picklable, refuse_reference, tensor_bytes
from dagrl.runtime.shapes import Batch


class Header(NamedTuple):
    """The replay that a packet belongs to.

    `tickets` gives, for each role, this replay's position in its workers' order: one number if it is the same for all
    workers of the graph, else one per worker position.
    """

    phase: str
    replay: int
    warmup: bool
    tickets: dict[str, int | tuple[int, ...]]
    deadline_s: float  # from its submission; the longest that a worker waits for its turn

    def ticket(self, role: str, position: int) -> int:
        tickets = self.tickets[role]
        return tickets if isinstance(tickets, int) else tickets[position]


class Packet(NamedTuple):
    """A value on an edge. `busy_s` is the compute time along the longest path that led to it."""

    header: Header
    value: object
    busy_s: float = 0.0
    failures: tuple[WorkerFailure, ...] = ()

    def wire(self) -> tuple[object, ...]:
        """Returns the packet as plain tuples, which pickle in a fifth of the time of named tuples; see `wire_body`."""
        return (tuple(self.header), *wire_body(self))

    @property
    def body(self) -> PacketBody:
        return self.value, self.busy_s, self.failures

    @staticmethod
    def from_wire(content: Any) -> Packet:
        if len(content) == 4:
            header, value, busy_s, failures = content
            return Packet(Header(*header), value, busy_s, failures)
        return Packet(Header(*content[0]), *body_from_wire(content[1:]))


def wire_body(packet: Packet) -> tuple[object, ...]:
    """Returns a packet without its header, as plain tuples.

    A batch is taken apart, which a fourth item says. Its arrays are sent as their bytes, in a quarter of the time that
    numpy's and dataclasses' own pickling takes.
    """
    value = packet.value
    if type(value) is Batch and _is_plain(value):
        data: Callable[[Any], object] = bytearray if _nbytes(value) < IN_BAND_BYTES else pickle.PickleBuffer
        arrays = [(name, np.ascontiguousarray(array)) for name, array in value.fields.items()]
        fields = [(name, array.dtype.str, array.shape, data(array)) for name, array in arrays]
        return (fields, dict(value.scalars)), packet.busy_s, packet.failures, True
    return value, packet.busy_s, packet.failures


def body_from_wire(content: Any) -> PacketBody:
    if len(content) == 4:
        fields, scalars = content[0]
        arrays = {name: np.ndarray(shape, dtype, data) for name, dtype, shape, data in fields}
        return Batch(arrays, scalars), content[1], content[2]
    body: PacketBody = content
    return body


def _is_plain(batch: Batch) -> bool:
    return {array.dtype.kind for array in batch.fields.values()} <= PLAIN_KINDS


def _nbytes(batch: Batch) -> int:
    return sum([array.nbytes for array in batch.fields.values()])


PacketBody = tuple[object, float, tuple[WorkerFailure, ...]]  # a packet without its header: value, `busy_s`, failures
ENVELOPE_BYTES = 4096  # room for a packet's header and the serializer's framing
FAILURE_CHARACTERS = 16_000  # tracebacks are cut to this many characters

IN_BAND_BYTES = 4096
"""Batches with smaller arrays are sent in one piece. A separate buffer costs more than copying this many bytes."""

PLAIN_KINDS = frozenset("biufcSU")  # kinds of numpy dtypes whose arrays have the size of their elements

PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes, bytearray, np.ndarray, Batch, Encoded, Shares})
"""Types of values that hold no tensors and no objects that need reducers of our own."""

SIZED = PLAIN_TYPES | {list, tuple, dict}


def payload_bytes(value: object) -> int:
    """Returns an upper bound of the bytes of a value in a channel; copies nothing. Raises RunError if it cannot be sent."""
    match value:
        case None | bool() | float():
            return 32
        case int():
            return 32 + value.bit_length() // 8
        case str():
            return 64 + 4 * len(value)
        case bytes() | bytearray():
            return 64 + len(value)
        case Batch():
            fields = 4 * sum(map(len, value.fields)) + 320 * len(value.fields) + _nbytes(value)
            return 320 + (fields if _is_plain(value) else payload_bytes(value.fields)) + payload_bytes(value.scalars)
    if type(value) is np.ndarray and value.dtype.kind in PLAIN_KINDS:
        return 256 + int(value.nbytes)
    if type(value) is dict:
        return 64 + sum(payload_bytes(key) + payload_bytes(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return 64 + sum(map(payload_bytes, value))  # type: ignore[call-overload]
    make_torch_picklable()
    if is_tensor(value):
        return tensor_bytes(value)
    if isinstance(value, ObjectRef):
        refuse_reference(value)
    if not isinstance(value, Encoded | Shares):
        value = Encoded.of(value)
    return value.payload_bytes


def encoded(value: object) -> object:
    """Returns a value that is pickled once: an `Encoded`, unless its size is known without that."""
    return value if type(value) in SIZED else Encoded.of(value)


def fit_failures(failures: tuple[WorkerFailure, ...], limit: int) -> tuple[WorkerFailure, ...]:
    """Returns the failures in at most `limit` bytes.

    Drops the tracebacks of all but the earliest failure, then the latest failures, and cuts the earliest if it is too long.
    """
    if payload_bytes(failures) <= limit:
        return failures
    first, *others = sorted(failures, key=lambda failure: failure.time_ns)
    characters = max(0, limit - 2048) // 8  # two texts of at most four bytes per character
    if len(first.message) + len(first.traceback) > characters:
        traceback = first.traceback[max(0, len(first.traceback) - characters) :]
        first = dataclasses.replace(first, message=first.message[:characters], traceback=traceback)
    kept = [first, *(dataclasses.replace(other, message=other.message[:200], traceback="") for other in others)]
    while payload_bytes(kept) > limit and len(kept) > 1:
        kept.pop()
    return tuple(kept)
