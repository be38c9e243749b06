"""The driver's side of a graph's outputs: in order, from the mailbox and from edges, and again after a deadline."""

from __future__ import annotations

import pickle
from collections import deque
from typing import Any

import pytest
from ray.exceptions import RayChannelTimeoutError

from dagrl.errors import WorkerFailure
from dagrl.runtime.edges.mailbox import Mailbox
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.edges.pickling import UnreadableError, load
from dagrl.runtime.executors.edge import MailboxSlot
from dagrl.runtime.executors.outputs import Outputs, Submitted
from tests.unit.runtime.unreadable import unreadable

HEADER = Header("phase", 7, False, {"train": 0}, 10.0)


class Posted:
    """An edge whose messages are announced in a mailbox; large ones are taken from it one after the other."""

    def __init__(self, mailbox: Mailbox, writer: int) -> None:
        self.mailbox_slot = MailboxSlot(mailbox.address, writer)
        self.large: deque[object] = deque()

    def read_message(self, number: int, timeout_s: float) -> object:
        found = self.large.popleft()
        return load(found) if isinstance(found, bytes) else found


class Other:
    """An edge that is read by itself, and has nothing to read the first time."""

    mailbox_slot = None

    def __init__(self) -> None:
        self.late = 1

    def read(self, timeout: float) -> Packet:
        if self.late:
            self.late -= 1
            raise RayChannelTimeoutError("no message in time")
        return Packet(HEADER, "other", 0.5)


def outputs_of(edges: list[Any], mailbox: Mailbox) -> Outputs:
    return Outputs(edges, mailbox, [(f"actor {number}", f"train[{number}].step") for number in range(len(edges))])


def test_a_read_that_timed_out_finds_everything_the_next_time() -> None:
    mailbox = Mailbox.create(2, 4)
    small, large, other = Posted(mailbox, 0), Posted(mailbox, 1), Other()
    edges: list[Any] = [large, other, small, other]
    outputs = outputs_of(edges, mailbox)
    mailbox.post(0, 1, pickle.dumps(("small", 0.1, ())), 1.0)
    mailbox.post(1, 1, pickle.dumps(1), 1.0)
    large.large.append(("large", 0.2, ()))
    with pytest.raises(RayChannelTimeoutError):
        outputs.read(Submitted(1, HEADER), 1.0)
    found = outputs.read(Submitted(1, HEADER), 1.0)
    assert [value for value, *_ in found] == ["large", "other", "small", "other"]


def test_what_was_read_is_not_looked_for_again_where_the_next_message_may_be() -> None:
    """While another output is late: its writer may be one replay ahead, and a ring gives what comes next."""
    mailbox = Mailbox.create(1, 4)
    near, far = Posted(mailbox, 0), Other()
    edges: list[Any] = [near, far]
    outputs = outputs_of(edges, mailbox)
    failure = WorkerFailure("train", 0, "", "", 1, "step", 1, "train.step", "raised", "ValueError", "", 0)
    for number in (1, 2):
        mailbox.post(0, number, pickle.dumps(number), 1.0)
        near.large.append((f"near {number}", 0.1, (failure,) if number == 1 else ()))
    with pytest.raises(RayChannelTimeoutError):
        outputs.read(Submitted(1, HEADER), 1.0)
    assert outputs.failures(Submitted(1, HEADER)) == [failure]
    assert outputs.failures(Submitted(1, HEADER)) == [failure]
    assert [value for value, *_ in outputs.read(Submitted(1, HEADER), 1.0)] == ["near 1", "other"]
    assert [value for value, *_ in outputs.read(Submitted(2, HEADER), 1.0)] == ["near 2", "other"]


def test_an_output_twice_is_read_once() -> None:
    mailbox = Mailbox.create(1, 4)
    edge: Any = Posted(mailbox, 0)
    mailbox.post(0, 1, pickle.dumps(("value", 0.1, ())), 1.0)
    assert outputs_of([edge, edge], mailbox).read(Submitted(1, HEADER), 1.0) == [("value", 0.1, ())] * 2


def test_a_mailbox_that_stays_empty_is_a_timeout() -> None:
    mailbox = Mailbox.create(1, 4)
    edge: Any = Posted(mailbox, 0)
    outputs = outputs_of([edge], mailbox)
    with pytest.raises(RayChannelTimeoutError):
        outputs.read(Submitted(1, HEADER), 0.05)
    mailbox.post(0, 1, pickle.dumps(("late", 0.1, ())), 1.0)
    assert outputs.read(Submitted(1, HEADER), 1.0) == [("late", 0.1, ())]


def failure(rank: int) -> WorkerFailure:
    return WorkerFailure("train", rank, "", "", rank, "phase", 7, "train.step", "raised", "ValueError", "traceback", rank)


def test_failures_are_seen_before_the_other_workers_have_answered() -> None:
    """In small messages and in large ones, again and again; the whole is read when all has come."""
    mailbox = Mailbox.create(4, 4)
    edges: list[Any] = [Posted(mailbox, writer) for writer in range(4)]
    outputs = outputs_of(edges, mailbox)
    assert outputs.failures(Submitted(1, HEADER)) == []
    mailbox.post(1, 1, pickle.dumps((None, 0.1, (failure(1),))), 1.0)
    mailbox.post(3, 1, pickle.dumps(1), 1.0)
    edges[3].large.append((None, 0.1, (failure(3),)))
    mailbox.post(0, 1, pickle.dumps(("fine", 0.1, ())), 1.0)
    for _ in range(2):
        with pytest.raises(RayChannelTimeoutError):
            outputs.read(Submitted(1, HEADER), 0.01)
        assert outputs.failures(Submitted(1, HEADER)) == [failure(1), failure(3)]
    mailbox.post(2, 1, pickle.dumps(("late", 0.1, ())), 1.0)
    assert [part[0] for part in outputs.read(Submitted(1, HEADER), 1.0)] == ["fine", None, "late", None]
    assert outputs.failures(Submitted(2, HEADER)) == []


@pytest.mark.parametrize("large", [False, True])
def test_a_result_that_cannot_be_unpickled_is_its_writers_and_the_next_replay_is_read(large: bool) -> None:
    mailbox = Mailbox.create(2, 4)
    edges: list[Any] = [Posted(mailbox, writer) for writer in range(2)]
    outputs, content = outputs_of(edges, mailbox), pickle.dumps((unreadable(), 0.1, ()))
    mailbox.post(1, 1, pickle.dumps(1) if large else content, 1.0)
    if large:
        edges[1].large.append(content)
    assert outputs.failures(Submitted(1, HEADER)) == []
    mailbox.post(0, 1, pickle.dumps(("fine", 0.1, ())), 1.0)
    with pytest.raises(UnreadableError, match="ValueError: cannot be made again") as caught:
        outputs.read(Submitted(1, HEADER), 1.0)
    assert caught.value.writer == ("actor 1", "train[1].step")
    for writer in range(2):
        mailbox.post(writer, 2, pickle.dumps(("next", 0.1, ())), 1.0)
    assert [part[0] for part in outputs.read(Submitted(2, HEADER), 1.0)] == ["next", "next"]


def test_what_an_edge_brings_and_cannot_be_unpickled_is_its_writers_unless_it_is_of_an_earlier_replay() -> None:
    class Unread:
        mailbox_slot = None

        def __init__(self) -> None:
            self.packets = deque([Packet(HEADER._replace(replay=6), unreadable()), Packet(HEADER, unreadable())])

        def read(self, timeout: float) -> Packet:
            return Packet.from_wire(load(pickle.dumps(self.packets.popleft().wire())))

    edge: Any = Unread()
    with pytest.raises(UnreadableError) as caught:
        Outputs([edge], None, [("its actor", "train[0].step")]).read(Submitted(1, HEADER), 1.0)
    assert caught.value.writer == ("its actor", "train[0].step") and not edge.packets
