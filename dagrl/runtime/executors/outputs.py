"""Reads a graph's outputs in the driver: those that workers post to its mailbox, and edges that are read one by one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from dagrl.errors import WorkerFailure
from dagrl.runtime.edges.mailbox import Mailbox
from dagrl.runtime.edges.packet import Header, Packet, PacketBody, body_from_wire
from dagrl.runtime.edges.pickling import UnreadableError
from dagrl.runtime.executors.edge import Edge, rays_errors


class Submitted(NamedTuple):
    """A replay of one graph: its number among the graph's replays, from 1, and the header of its input."""

    number: int
    header: Header


class Outputs:
    """The outputs of one graph, in order; `writers`: the actor's id and the node's label of each."""

    def __init__(self, edges: Sequence[Edge], mailbox: Mailbox | None, writers: Sequence[tuple[str, str]]) -> None:
        self._edges = tuple(edges)
        self._writers = dict(zip(edges, writers, strict=True))
        self._mailbox = mailbox
        self._posted = {edge.mailbox_slot.writer: edge for edge in edges if edge.mailbox_slot is not None}
        self._others = dict.fromkeys(edge for edge in edges if edge.mailbox_slot is None)
        self._as_posted = len(self._posted) == len(edges)  # all are posted, and none is two outputs
        self._number = 0
        self._arrived: dict[Edge | None, Any] = {}  # of replay `_number`, before a deadline; None: the mailbox
        self._taken: dict[tuple[int, int], PacketBody | UnreadableError] = {}  # from rings, by replay and writer

    def read(self, replay: Submitted, timeout_s: float) -> list[PacketBody]:
        """Returns the body of each output of a replay.

        A read that timed out can be tried again. Raises Ray's channel errors, and Ray errors that a node sent;
        UnreadableError for a value that this process cannot unpickle: the replay is over and the edges are whole.
        """
        deadline = time.perf_counter() + timeout_s
        if self._as_posted and self._mailbox is not None:
            return self._read_mailbox(self._mailbox, replay.number, deadline)
        if self._number != replay.number:
            self._number, self._arrived = replay.number, {}
        arrived = self._arrived
        if self._mailbox is not None and None not in arrived:
            arrived[None] = self._read_mailbox(self._mailbox, replay.number, deadline)
        for edge in self._others:
            if edge not in arrived:
                arrived[edge] = self._read_edge(edge, replay.header, deadline)
        self._arrived = {}
        return [
            arrived[edge] if edge.mailbox_slot is None else arrived[None][edge.mailbox_slot.writer] for edge in self._edges
        ]

    def failures(self, replay: Submitted) -> list[WorkerFailure]:
        """Returns the failures in the outputs that came of a replay whose read timed out. Raises Ray's channel errors."""
        arrived = self._arrived if self._number == replay.number else {}
        bodies = [body for edge, body in arrived.items() if edge is not None] + arrived.get(None, [])
        if self._mailbox is not None and None not in arrived:  # announced results are still in the rings
            with rays_errors:
                messages = self._mailbox.look(replay.number)
                bodies += [self._body(writer, message, replay.number, 0.0) for writer, message in messages.items()]
        return [failure for body in bodies if not isinstance(body, Exception) for failure in body[2]]

    def _read_mailbox(self, mailbox: Mailbox, number: int, deadline: float) -> list[PacketBody]:
        with rays_errors:
            messages: list[Any] = mailbox.collect(number, deadline - time.perf_counter())
            for writer, message in enumerate(messages):
                if type(message) is tuple and len(message) == 3:  # a body as it is
                    continue
                messages[writer] = body = self._body(writer, message, number, max(0.0, deadline - time.perf_counter()))
                if isinstance(body, Exception):  # Ray's own, or an UnreadableError; workers' failures are in the bodies
                    raise self._by(self._posted[writer], body)
        self._taken.clear()
        return messages

    def _body(self, writer: int, message: Any, number: int, timeout_s: float) -> PacketBody | Exception:
        """Returns the body that a message of the mailbox holds, or announces in the writer's ring; or its error."""
        if type(message) is tuple:
            return body_from_wire(message)
        if isinstance(message, Exception):
            return message
        key = (number, writer)
        if key not in self._taken:
            try:
                self._taken[key] = body_from_wire(self._posted[writer].read_message(message, timeout_s))
            except UnreadableError as error:  # the message counts as read
                self._taken[key] = error
        return self._taken[key]

    def _read_edge(self, edge: Edge, header: Header, deadline: float) -> PacketBody:
        while True:
            try:
                packet: Packet | Exception = edge.read(max(0.0, deadline - time.perf_counter()))
            except UnreadableError as error:
                if Packet.from_wire(error.content).header.replay < header.replay:
                    continue
                raise self._by(edge, error) from error.__cause__
            if isinstance(packet, Exception):
                raise packet
            if packet.header.replay >= header.replay:
                return packet.body

    def _by(self, edge: Edge, error: Exception) -> Exception:
        """Returns the error, with the name of the writer if its value cannot be read."""
        if isinstance(error, UnreadableError):
            error.writer = self._writers[edge]
        return error
