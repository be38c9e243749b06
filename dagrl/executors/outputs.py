"""The driver's side of a graph's outputs: what the workers announce in its mailbox, and edges that are read one by one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from dagrl.errors import WorkerFailure
from dagrl.executors.edge import Edge, rays_errors
from dagrl.executors.mailbox import Mailbox
from dagrl.executors.packet import Header, Packet, Part, part_from_wire


class Submitted(NamedTuple):
    """A replay of one graph: its place in the order of the graph's replays, from 1, and the header of its input."""

    number: int
    header: Header


class Outputs:
    """The outputs of one graph, in order."""

    def __init__(self, edges: Sequence[Edge], mailbox: Mailbox | None) -> None:
        self._edges = tuple(edges)
        self._mailbox = mailbox
        self._posted = {edge.place.writer: edge for edge in edges if edge.place is not None}
        self._others = dict.fromkeys(edge for edge in edges if edge.place is None)
        self._as_posted = len(self._posted) == len(edges)  # no other edges, and none that is two outputs
        self._number = 0
        self._come: dict[Edge | None, Any] = {}  # of replay `_number`: what came before a deadline; None: the mailbox
        self._taken: dict[tuple[int, int], Part] = {}  # by replay and writer: large messages that `failures` took from rings

    def read(self, replay: Submitted, timeout_s: float) -> list[Part]:
        """What each output is in a replay. Raises Ray's errors of channels, and errors of Ray's that a node sent.

        A read that timed out can be tried again.
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
        parts = [part for edge, part in self._come.items() if edge is not None]
        if self._mailbox is not None:
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
                if isinstance(message, Exception):  # an error of Ray's own; those of workers are in their parts
                    raise message
                messages[writer] = self._part(writer, message, number, max(0.0, deadline - time.perf_counter()))
        self._taken.clear()
        return messages

    def _part(self, writer: int, message: Any, number: int, timeout_s: float) -> Part:
        """What a message of the mailbox says, or announces. An error of Ray's is no failure; `read` raises it."""
        if type(message) is tuple:
            return part_from_wire(message)
        if isinstance(message, Exception):
            return None, 0.0, ()
        key = (number, writer)
        if key not in self._taken:
            self._taken[key] = part_from_wire(self._posted[writer].read_message(message, timeout_s))
        return self._taken[key]

    def _read_edge(self, edge: Edge, header: Header, deadline: float) -> Part:
        while True:
            packet: Packet | Exception = edge.read(max(0.0, deadline - time.perf_counter()))
            if isinstance(packet, Exception):
                raise packet
            if packet.header.replay >= header.replay:
                return packet.part
