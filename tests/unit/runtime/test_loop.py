"""The end of a worker's loop: without a word where an edge was closed, with an error where a link was lost."""

from __future__ import annotations

import pickle
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayChannelError, RayChannelTimeoutError, RayTaskError

from dagrl.errors import RunError
from dagrl.runtime.edges.link import LinkAddress, LinkReader, LinkWriter
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.executors import compiled, edge, loop, ray_dag
from dagrl.runtime.executors.base import GraphLimits
from dagrl.runtime.executors.compiled import CompiledGraph
from dagrl.runtime.executors.edge import Edge, EdgeDescription
from dagrl.runtime.executors.node import NodeCall, install
from dagrl.runtime.executors.outputs import Submitted
from tests.unit.runtime.unreadable import unreadable

HEADER = Header("phase", 0, False, {"train": 0}, 10.0)
PATIENCE_S = 30.0
LOST = r"train worker 3 lost the link (from|to) another host, from 127\.0\.0\.1:\d+ to 127\.0\.0\.1:\d+: "


class Hosts:
    """A worker with one node, and the hosts that it reads from and writes to: only the ends of their links."""

    def __init__(self) -> None:
        self.before, self.after = LinkWriter("127.0.0.1", 1 << 16, 2), LinkWriter("127.0.0.1", 1 << 16, 2)
        self.reader_after = LinkReader(self.after.address)
        self.input, self.output = edge_over(self.before.address), edge_over(self.after.address)
        edge._links[self.output.description.name] = [self.after]
        self.worker = SimpleNamespace()
        install(self.worker, "train", 3, "")
        node = SimpleNamespace(input_variant=self._run)
        self.unread: list[bool] = []
        given = [
            SimpleNamespace(
                input_variant=NodeCall("train", "train[3].step", 0, "map", "step", (), {}, 0, True, 1 << 20, "")
            ),
            SimpleNamespace(resolve=lambda packets: packets[0]),
        ]
        self.task: Any = SimpleNamespace(
            prepare=self.input.ensure_registered_as_reader,
            input_channels=[self.input],
            output_channels=[self.output],
            task_inputs=[node, *given],
        )

    def _run(self, worker: object, call: NodeCall, packet: Packet) -> Packet:
        self.unread.append(call.unread)
        return result_of(packet)

    def send(self, value: object) -> None:
        self.before.write([pickle.dumps(Packet(HEADER, value).wire())], PATIENCE_S)

    def receive(self) -> object:
        return self.receive_packet().value

    def receive_packet(self) -> Packet:
        return Packet.from_wire(self.reader_after.read(PATIENCE_S))

    def cut_before(self) -> None:
        cut(self.before)

    def cut_after(self) -> None:
        """The worker notices when it writes: what was on its way may still be taken."""
        cut(self.reader_after)
        for _ in range(20):
            self.send("more")
            time.sleep(0.05)


def result_of(packet: Packet) -> Packet:
    """The packet itself, or with a lock in place of what says so."""
    return packet._replace(value=threading.Lock()) if packet.value == "a lock" else packet


def cut(end: LinkReader | LinkWriter) -> None:
    """As when the process at this end is gone."""
    assert end._socket is not None
    end._socket.shutdown(socket.SHUT_RDWR)


def edge_over(address: LinkAddress) -> Edge:
    return Edge(EdgeDescription(uuid.uuid4().hex, None, (), None, {"reader": address}, None, "reader", None))


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    context = SimpleNamespace(get_actor_id=lambda: None)
    monkeypatch.setattr(edge, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    hosts = Hosts()
    yield hosts
    for one in (hosts.input, hosts.output):
        one.close()
    hosts.before.close()
    hosts.reader_after.close()


def rays_loop(worker: object, tasks: Any, *rays: object) -> None:
    """What Ray's loop does here: it runs the nodes until a channel is closed, and returns."""
    (task,) = tasks
    task.prepare()
    try:
        while True:
            task.output_channels[0].write(task.input_channels[0].read())
    except RayChannelError:
        return


@pytest.mark.parametrize("lost", [Hosts.cut_before, Hosts.cut_after], ids=["input", "output"])
@pytest.mark.parametrize("run", [loop.run_tasks, ray_dag.run_rays_tasks])
def test_a_lost_link_ends_the_loop_with_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, hosts: Hosts, run: Callable[..., None], lost: Callable[[Hosts], None]
) -> None:
    monkeypatch.setattr("ray.dag.compiled_dag_node.do_exec_tasks", rays_loop)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run, hosts.worker, [hosts.task], None)
        hosts.send(7)
        assert hosts.receive() == 7
        lost(hosts)
        with pytest.raises(RayChannelError, match=LOST) as caught:
            done.result(PATIENCE_S)
    sent = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  # of this process
    assert sent.time_ns == caught.value.time_ns


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (unreadable(), "UnreadableError: ValueError: cannot be made again, when a value was unpickled"),
        ("a lock", "TypeError: cannot pickle '_thread.lock' object"),
    ],
    ids=["read", "written"],
)
def test_what_cannot_be_read_or_written_is_a_failure_of_the_worker_whose_loop_goes_on(
    hosts: Hosts, value: object, message: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(loop.run_tasks, hosts.worker, [hosts.task])
        hosts.send(value)
        (failure,) = hosts.receive_packet().failures
        assert (failure.role, failure.rank, failure.node, failure.phase) == ("train", 3, "train[3].step", "phase")
        assert failure.message.startswith(message)
        hosts.send(7)
        assert hosts.receive() == 7
        assert hosts.unread == [value != "a lock", False]
        hosts.input.close()
        done.result(PATIENCE_S)


@pytest.mark.parametrize("run", [loop.run_tasks, ray_dag.run_rays_tasks])
def test_edges_that_are_closed_end_the_loop_without_a_word(
    monkeypatch: pytest.MonkeyPatch, hosts: Hosts, run: Callable[..., None]
) -> None:
    monkeypatch.setattr("ray.dag.compiled_dag_node.do_exec_tasks", rays_loop)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run, hosts.worker, [hosts.task], None)
        hosts.send(7)
        assert hosts.receive() == 7
        hosts.input.close()
        done.result(PATIENCE_S)


def raised(time_ns: int, cause: Exception) -> RayTaskError:
    cause.time_ns = time_ns  # type: ignore[attr-defined]
    return RayTaskError("loop", "", cause)


def live_graph(
    write: Callable[..., object] = lambda *words: None,
    read: Callable[..., object] = lambda *words: [],
    loops: Iterable[str] = (),
) -> CompiledGraph:
    """A graph with these edges, whose workers' loops have these names; without Ray."""
    dag = SimpleNamespace(worker_task_refs={name: name for name in loops}, teardown=lambda: None)
    start: Any = SimpleNamespace(write=write)
    outputs: Any = SimpleNamespace(read=read)
    gathering: Any = SimpleNamespace(put_together=lambda header, parts: parts)
    limits = GraphLimits(1 << 16, 1 << 16, max_in_flight=2, compile_s=1.0, replay_s=7.0, teardown_s=1.0)
    return CompiledGraph("train_step", limits, dag, "its loops", start, outputs, gathering)


def told(monkeypatch: pytest.MonkeyPatch, loops: dict[str, Exception | None]) -> None:
    """Ask a graph what ended it, whose workers' loops end one after the other with an error, or without."""

    def get(ended: list[str]) -> None:
        if (error := loops[ended[0]]) is not None:
            raise error

    def closed(asked: object, timeout_s: float) -> None:
        raise RayChannelError("an edge was closed")

    fake = SimpleNamespace(wait=lambda running, timeout: (running[:1], running[1:]), get=get)
    monkeypatch.setattr(compiled, "ray", fake)
    monkeypatch.setattr(ray_dag, "call_loop", lambda actor, function, name: actor)
    monkeypatch.setattr(compiled, "deaths", SimpleNamespace(watch=lambda graph, actors: None))
    live_graph(read=closed, loops=loops).fetch(Submitted(1, HEADER), 3.0)


def test_the_first_link_that_was_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    later, first = raised(2, RayChannelError("by teardown")), raised(1, RayChannelError("the cause"))
    with pytest.raises(RayChannelError, match="the cause") as caught:
        told(monkeypatch, {"a": None, "b": later, "c": first})
    assert caught.value is first.cause
    other = RayTaskError("loop", "of our own", ValueError())
    with pytest.raises(RayTaskError, match="of our own"):
        told(monkeypatch, {"b": later, "c": other})


def test_a_death_is_told_rather_than_links_that_were_lost_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ActorDiedError):
        told(monkeypatch, {"b": raised(1, RayChannelError("lost")), "c": ActorDiedError()})


def test_a_graph_whose_loops_ended_without_errors_tells_of_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RayChannelError, match="an edge was closed"):
        told(monkeypatch, {"a": None, "b": None})


def test_a_driver_waits_for_room_and_results_no_longer_than_it_was_told() -> None:
    """A result that is late can still come."""
    waited: list[float] = []

    def late(asked: object, timeout_s: float) -> None:
        waited.append(timeout_s)
        raise RayChannelTimeoutError("full, or empty")

    graph = live_graph(write=late, read=late)
    with pytest.raises(RunError, match="no room for the input of phase 'train_step' in 7 s"):
        graph.submit(Packet(HEADER, 0))
    with pytest.raises(TimeoutError, match="full, or empty"):
        graph.fetch(Submitted(1, HEADER), 3.0)
    assert waited == [7.0, 3.0]
    graph = live_graph()
    assert [graph.submit(Packet(HEADER, 0)).number for _ in range(2)] == [1, 2]
