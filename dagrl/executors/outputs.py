"""The driver's side of a graph's outputs: what the workers announce in its mailbox, and edges that are read one by one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from dagrl.errors import WorkerFailure
from dagrl.executors.edge import Edge, rays_errors
from dagrl.executors.mailbox import Mailbox
from dagrl.executors.packet import Header, Packet, Part, part_from_wire
from dagrl.executors.pickling import UnreadableError


class Submitted(NamedTuple):
    """A replay of one graph: its place in the order of the graph's replays, from 1, and the header of its input."""

    number: int
    header: Header


class Outputs:
    """The outputs of one graph, in order; `writers` are the actors (by id) and nodes (by label) they come from."""

    def __init__(self, edges: Sequence[Edge], mailbox: Mailbox | None, writers: Sequence[tuple[str, str]]) -> None:
        self._edges = tuple(edges)
        self._writers = dict(zip(edges, writers, strict=True))
        self._mailbox = mailbox
        self._posted = {edge.place.writer: edge for edge in edges if edge.place is not None}
        self._others = dict.fromkeys(edge for edge in edges if edge.place is None)
        self._as_posted = len(self._posted) == len(edges)  # no other edges, and none that is two outputs
        self._number = 0
        self._come: dict[Edge | None, Any] = {}  # of replay `_number`: what came before a deadline; None: the mailbox
        self._taken: dict[tuple[int, int], Part | UnreadableError] = {}  # from rings, by replay and writer

    def read(self, replay: Submitted, timeout_s: float) -> list[Part]:
        """What each output is in a replay.

        A read that timed out can be tried again. Raises Ray's errors of channels, and errors of Ray's that a node sent;
        UnreadableError for a value that this process cannot make: then the replay is over, and the edges are whole.
        """
        deadline = time.perf_counter() + timeout_s
        if self._as_posted and self._mailbox is not None:
            return self._read_mailbox(self._mailbox, replay.number, deadline)
        if self._number != replay.number:
            self._number, self._come = replay.number, {}
        come = self._come
        if self._mailbox is not None and None not in come:
            come[None] = self._read_mailbox(self._mailbox, replay.number, deadline)
        for edge in self._others:
            if edge not in come:
                come[edge] = self._read_edge(edge, replay.header, deadline)
        self._come = {}
        return [come[edge] if edge.place is None else come[None][edge.place.writer] for edge in self._edges]

    def failures(self, replay: Submitted) -> list[WorkerFailure]:
        """Those in the outputs that have come of a replay whose read timed out. Raises Ray's errors of channels."""
        come = self._come if self._number == replay.number else {}
        parts = [part for edge, part in come.items() if edge is not None] + come.get(None, [])
        if self._mailbox is not None and None not in come:  # what it announced is in the rings still
            with rays_errors:
                messages = self._mailbox.look(replay.number)
                parts += [self._part(writer, message, replay.number, 0.0) for writer, message in messages.items()]
        return [failure for part in parts for failure in part[2]]

    def _read_mailbox(self, mailbox: Mailbox, number: int, deadline: float) -> list[Part]:
        with rays_errors:
            messages: list[Any] = mailbox.collect(number, deadline - time.perf_counter())
            for writer, message in enumerate(messages):
                if type(message) is tuple:
                    if len(message) == 4:
                        messages[writer] = part_from_wire(message)
                    continue
                if not isinstance(message, Exception):
                    message = self._large(writer, message, number, max(0.0, deadline - time.perf_counter()))
                if isinstance(message, Exception):  # Ray's own, or of reading; those of workers are in their parts
                    raise self._by(self._posted[writer], message)
                messages[writer] = message
        self._taken.clear()
        return messages

    def _part(self, writer: int, message: Any, number: int, timeout_s: float) -> Part:
        """What a message of the mailbox says, or announces. An error is no failure of a worker; `read` raises it."""
        if type(message) is tuple:
            return part_from_wire(message)
        found = message if isinstance(message, Exception) else self._large(writer, message, number, timeout_s)
        return (None, 0.0, ()) if isinstance(found, Exception) else found

    def _large(self, writer: int, message: Any, number: int, timeout_s: float) -> Part | UnreadableError:
        """What a message of the mailbox announces."""
        key = (number, writer)
        if key not in self._taken:
            try:
                self._taken[key] = part_from_wire(self._posted[writer].read_message(message, timeout_s))
            except UnreadableError as error:  # it counts as read
                self._taken[key] = error
        return self._taken[key]

    def _read_edge(self, edge: Edge, header: Header, deadline: float) -> Part:
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
                return packet.part

    def _by(self, edge: Edge, error: Exception) -> Exception:
        """The error, with the name of who wrote what cannot be read."""
        if isinstance(error, UnreadableError):
            error.writer = self._writers[edge]
        return error
