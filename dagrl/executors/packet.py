"""What travels along the edges of a graph: a value, with the replay it belongs to and the failures met on the way.

A worker's exception is carried as data, not raised inside Ray: the graph stays alive, every node still runs its turn, and
the driver sees one `WorkerFailure` for each worker that failed.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dagrl.errors import WorkerFailure
from dagrl.shapes import Batch


class Header(NamedTuple):
    """Which replay a packet belongs to.

    `tickets` gives, for each role, the place of this replay in its workers' order: one number when it is the same for all
    workers of the graph, else one a worker position.
    """

    phase: str
    replay: int
    warmup: bool
    tickets: dict[str, int | tuple[int, ...]]

    def ticket(self, role: str, position: int) -> int:
        """The ticket of one worker of the graph."""
        tickets = self.tickets[role]
        return tickets if isinstance(tickets, int) else tickets[position]


class Packet(NamedTuple):
    """A value on an edge; `busy_s` is the compute time along the longest path that led to it."""

    header: Header
    value: object
    busy_s: float = 0.0
    failures: tuple[WorkerFailure, ...] = ()


ENVELOPE_BYTES = 4096
"""Room for a packet's header and for the serializer's own framing."""

FAILURE_CHARACTERS = 16_000
"""A traceback is cut to this many characters, so that a failure fits any result buffer."""


def payload_bytes(value: object) -> int:
    """Bytes that a value needs in a channel, an upper bound that is cheap for arrays."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes) + 256
    if isinstance(value, str | bytes | bytearray):
        return len(value) * (4 if isinstance(value, str) else 1) + 64
    if isinstance(value, bool | int | float) or value is None:
        return 32
    if isinstance(value, Batch):
        return payload_bytes(value.fields) + payload_bytes(value.scalars) + 256
    if isinstance(value, Mapping):
        return 64 + sum(payload_bytes(key) + payload_bytes(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return 64 + sum(payload_bytes(item) for item in value)
    return len(pickle.dumps(value, protocol=5)) + 256
