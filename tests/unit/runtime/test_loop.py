"""A worker's loop and its edges, in one process: silent where an edge was closed, an error where a link was lost."""

import gc
import pickle
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from dagrl.errors import RunError
from dagrl.runtime.edges.mailbox import CELL_BYTES, Mailbox
from dagrl.runtime.edges.memory import EdgeClosedError, EdgeLostError
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.edges.pickling import UnreadableError
from dagrl.runtime.edges.ring import Ring
from dagrl.runtime.executors import edge
from dagrl.runtime.executors.edge import DRIVER, EdgeReader, EdgeSpec, EdgeWriter
from dagrl.runtime.executors.loop import LoopNode, _loops, end_loop, loop_runs, prepare_loop, start_loop
from dagrl.runtime.executors.node import NodeCall, Take, install
from dagrl.runtime.graph import Source
from tests.unit.runtime.test_link import cut
from tests.unit.runtime.unreadable import Unreadable

PATIENCE_S = 30.0
ROOM = 1 << 18
LOST = r"train worker 3 lost the link (from|to) another host, from 127\.0\.0\.1:\d+ to 127\.0\.0\.1:\d+: "


@pytest.fixture(autouse=True)
def _one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "ray", SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")))


def header(ticket: int) -> Header:
    return Header("phase", ticket, False, {"train": ticket}, 10.0)


def worker() -> Any:
    made = SimpleNamespace(step=lambda *values: values[0] if len(values) == 1 else values, abort=Mock())
    install(made, "train", 3, "")
    return made


def node(number: int, sources: Sequence[Source], spec: EdgeSpec, place: int = 0, last: bool = True) -> LoopNode:
    takes = tuple(Take(index) for index in range(len(sources)))
    call = NodeCall("train", f"train[3].step{number}", 0, "map", "step", takes, {}, place, last, 1 << 20, "", number=number)
    return LoopNode(call, tuple(sources), spec)


class Running:
    """A loop of one worker, and this process as the driver that sends its input and reads its results."""

    def __init__(self, nodes: Sequence[LoopNode], start: EdgeSpec, mailbox: Mailbox | None = None) -> None:
        self.worker, self.name, self.ticket = worker(), uuid.uuid4().hex, 0
        self.start = EdgeWriter(start)
        address = None if mailbox is None else mailbox.address
        made = prepare_loop(self.worker, self.name, nodes, address)
        start_loop(self.worker, self.name, 0, {None: self.start.address, **made})
        self.readers = {number: EdgeReader(found, DRIVER) for number, found in made.items()}

    def send(self, value: object) -> None:
        self.start.write(Packet(header(self.ticket), value), PATIENCE_S)
        self.ticket += 1

    def receive(self, number: int = 0) -> Packet:
        return self.readers[number].read(PATIENCE_S)

    def end(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while not end_loop(self.worker, self.name):
            assert time.monotonic() < until
            time.sleep(0.01)


NEAR = EdgeSpec(ROOM, 2, near=(DRIVER,))
FAR = EdgeSpec(ROOM, 2, far=(DRIVER,))


@pytest.fixture(params=["ring", "link"])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A loop of one node on this host, or between links to another one."""
    far = request.param == "link"
    start = EdgeSpec(ROOM, 2, far=(0,)) if far else EdgeSpec(ROOM, 2, near=(0,))
    loop = Running([node(0, [None], FAR if far else NEAR)], start)
    yield loop
    loop.start.close()


def test_an_unreadable_value_ends_the_loop_and_frees_the_workers_peers(running: Running) -> None:
    running.send(Unreadable())
    with pytest.raises(EdgeClosedError):
        running.receive()
    with pytest.raises(UnreadableError, match="train worker 3: ValueError: cannot be made again, when a value"):
        running.end()
    assert running.worker.abort.call_count == 1


def test_an_unpicklable_result_is_a_failure_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch, running: Running) -> None:
    write = EdgeWriter.write

    def refuse(self: EdgeWriter, packet: Packet, timeout_s: float | None = None) -> None:
        if packet.value == "refused" and self is not running.start:
            raise TypeError("cannot be sent")
        write(self, packet, timeout_s)

    monkeypatch.setattr(EdgeWriter, "write", refuse)
    running.send("refused")
    (failure,) = running.receive().failures
    assert (failure.role, failure.rank, failure.node, failure.phase) == ("train", 3, "train[3].step0", "phase")
    assert failure.message.startswith("TypeError: cannot be sent")
    assert not running.worker.abort.called
    running.send(7)
    assert running.receive().value == 7


@pytest.mark.parametrize("closes", [lambda one: one.start.close(), lambda one: one.readers[0].close(), None])
def test_closing_an_edge_ends_the_loop_silently(closes: Callable[[Running], None] | None) -> None:
    """None: the loop is told to end."""
    running = Running([node(0, [None], NEAR)], EdgeSpec(ROOM, 2, near=(0,)))
    running.send(7)
    assert running.receive().value == 7 and loop_runs(running.worker, running.name)
    if closes is not None:
        closes(running)
        with suppress(EdgeClosedError):
            running.send(8)
    running.end()
    assert not loop_runs(running.worker, running.name)
    with pytest.raises(EdgeClosedError):
        while True:
            running.receive()


@pytest.mark.parametrize("lost", ["input", "output"])
def test_a_lost_link_ends_the_loop_with_an_error_that_names_it(lost: str) -> None:
    running = Running([node(0, [None], FAR)], EdgeSpec(ROOM, 2, far=(0,)))
    running.send(7)
    assert running.receive().value == 7
    if lost == "input":
        cut(running.start._links[0])
    else:
        link = running.readers[0]._link
        assert link is not None
        cut(link)
    until = time.monotonic() + PATIENCE_S
    while loop_runs(running.worker, running.name) and time.monotonic() < until:
        if lost == "output":  # it notices when it writes: what was on its way may still be taken
            with suppress(EdgeClosedError):
                running.send("more")
        time.sleep(0.01)
    with pytest.raises(EdgeLostError, match=LOST) as caught:
        running.end()
    sent = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  # of this process
    assert sent.time_ns == caught.value.time_ns  # type: ignore[attr-defined]
    running.end()  # nothing is left of it


def test_a_loop_that_was_ended_before_it_began_does_not_begin() -> None:
    mine, name = worker(), uuid.uuid4().hex
    made = prepare_loop(mine, name, [node(0, [None], NEAR)], None)
    reader = EdgeReader(made[0], DRIVER)
    assert not loop_runs(mine, name) and end_loop(mine, name) and end_loop(mine, name)
    with pytest.raises(RunError, match="torn down before its loops began"):
        start_loop(mine, name, 0, {})
    with pytest.raises(EdgeClosedError):
        reader.read(1.0)


def test_shared_values_are_read_once_and_own_values_passed_by_reference() -> None:
    keep = EdgeSpec(ROOM, 2)
    nodes = [
        node(0, [None], keep, 0, False),
        node(1, [None, 0, None], keep, 1, False),
        node(2, [0], keep, 2, False),
        node(3, [None], keep, 3, False),
        node(4, [1, 2, 3], NEAR, 4),
    ]
    running = Running(nodes, EdgeSpec(ROOM, 2, near=(0,)))
    for turn in range(5):
        running.send([turn])
        assert running.receive(4).value == (([turn], [turn], [turn]), [turn], [turn])
    running.end()


def test_small_results_of_a_scripts_classes_with_arrays_fit_a_cell() -> None:
    """Sent by value, because the other process cannot import the classes of a script."""
    script: Any = type("Found", (), {"__module__": "__main__"})
    mailbox = Mailbox.create(1, 2)
    writer = EdgeWriter(replace(NEAR, cell=0), mailbox)
    reader = EdgeReader(writer.address, DRIVER)
    for number, size in enumerate((4, 100, CELL_BYTES), start=1):
        found = script()
        found.array = np.arange(size)
        writer.write(Packet(header(0), found), 1.0)
        (message,) = mailbox.collect(number, 1.0)
        assert isinstance(message, tuple) == (size < CELL_BYTES)
        if not isinstance(message, tuple):  # its number in the ring
            message = reader.read_message(int(str(message)), 1.0)
        assert message[0].array.tolist() == list(range(size))


def test_messages_before_the_announced_one_are_dropped() -> None:
    mailbox = Mailbox.create(1, 4)
    writer = EdgeWriter(EdgeSpec(ROOM, 4, near=(DRIVER,), cell=0), mailbox)
    reader = EdgeReader(writer.address, DRIVER)
    large = np.zeros(CELL_BYTES)
    for value in ([large, Unreadable()], [large, "second"], [large, "third"]):
        writer.write(Packet(header(0), value), 1.0)
    for number, word in ((2, "second"), (3, "third")):
        assert reader.read_message(number, 1.0)[0][1] == word


def test_memory_and_ports_end_with_the_loop() -> None:
    running = Running([node(0, [None], EdgeSpec(ROOM, 2, near=(1,), far=(DRIVER,)))], EdgeSpec(ROOM, 2, near=(0,)))
    address = _loops[running.name].writers[0].address
    running.end()
    gc.collect()
    assert address.ring is not None
    with pytest.raises(EdgeClosedError):
        Ring.open(address.ring)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.far[DRIVER].host, address.far[DRIVER].port), timeout=5.0)
