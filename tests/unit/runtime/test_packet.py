"""Packets on edges: values as bytes, sizes against Ray's own serializer, failures that fit, and the order of tickets."""

import copyreg
import dataclasses
import math
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import ray._private.worker
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays
from ray._private.serialization import SerializationContext

from dagrl.errors import DeadlineError, RunError, WorkerFailure
from dagrl.rl.generation import FinishedRequest, pack_generated
from dagrl.runtime.edges.packet import ENVELOPE_BYTES, Header, Packet, fit_failures, payload_bytes
from dagrl.runtime.edges.pickling import UnreadableError, accelerator_tensors, dump, load
from dagrl.runtime.executors.base import GraphLimits, node_calls
from dagrl.runtime.executors.node import NodeCall, Take, TicketGate, install, run_node, state_of
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Role, Shard, methods_of, phase
from dagrl.runtime.shapes import Batch
from dagrl.telemetry.metrics import StepMetrics

RAY = SerializationContext(ray._private.worker.global_worker)  # what writes a compiled graph's channels; needs no cluster


def ray_bytes(value: object) -> int:
    """Bytes that Ray writes into a channel for a packet with `value`: pickle, out-of-band buffers and their alignment."""
    return int(RAY.serialize(Packet(Header("train_step", 1_000_000, False, {"train": 1_000_000}, 10.0), value)).total_bytes)


def check_bound(value: object) -> None:
    assert ray_bytes(value) <= payload_bytes(value) + ENVELOPE_BYTES
    many = [value] * 50  # Ray writes an object once, however often it is there
    assert ray_bytes(many) <= payload_bytes(many) + ENVELOPE_BYTES


SCALARS = (
    st.none() | st.booleans() | st.floats() | st.integers() | st.integers(-(2**4000), 2**4000) | st.text() | st.binary()
)
SHAPES = arrays.array_shapes(min_dims=0, max_dims=6, min_side=0, max_side=4)
ARRAYS = arrays.arrays(arrays.scalar_dtypes() | arrays.array_dtypes(), SHAPES)
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=8)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=8)
        | st.dictionaries(st.text(max_size=8), st.floats(), max_size=8).map(lambda sums: StepMetrics(sums, sums, sums))
    ),
    max_leaves=20,
)


@given(VALUES)
def test_payload_bytes_is_an_upper_bound_of_what_ray_writes(value: Any) -> None:
    check_bound(value)


class Pair(NamedTuple):
    first: object
    second: object


@dataclass(frozen=True)
class Nested:
    name: str
    array: np.ndarray


def locally_defined() -> object:
    @dataclass
    class Local:
        text: str = "x" * 100

        def method(self) -> str:
            return self.text * 1000

    return Local()


STRUCTURED = np.dtype([("a_long_field_name" * 20, "f8"), ("b" * 300, "i4", (3,))])


@pytest.mark.parametrize(
    "value",
    [
        [np.zeros(0) for _ in range(100)],
        [np.zeros((1,) * 8) for _ in range(60)],
        np.zeros((64, 64))[:, ::2],
        np.zeros((64, 64), order="F"),
        np.zeros((1000, 1000)).T,
        np.array([{"a": "x" * 1000}, None, "y" * 10_000], dtype=object),
        np.zeros(3, STRUCTURED),
        [np.zeros(1, [(f"field{number}" * 30, "f8")]) for number in range(100)],
        np.ma.masked_array(np.zeros(10_000), mask=np.ones(10_000)),
        [np.float32(number) for number in range(100)],
        [10**100 + number for number in range(100)],
        ["é€😀" * 30 + str(number) for number in range(100)],
        [bytearray(100) for _ in range(100)],
        [Pair(number, [number]) for number in range(60)],
        [Nested(str(number), np.zeros(number)) for number in range(60)],
        Batch({"tokens": np.zeros((64, 512), np.int64), "lengths": np.zeros(64, np.int64)}, {"lr": 1e-3, "name": "x"}),
        [Batch({"lengths": np.ones(number)}) for number in range(100)],
        pack_generated([FinishedRequest(row, [1] * 64, [0.5] * 64, [0] * 64, "stop") for row in range(64)], [], 16),
        locally_defined(),
        [locally_defined() for _ in range(20)],
        lambda: "a function",
    ],
    ids=lambda value: type(value).__name__,
)
def test_awkward_values_are_bounded_too(value: object) -> None:
    check_bound(value)


def test_the_bound_of_arrays_is_close() -> None:
    batch = Batch({"tokens": np.zeros((64, 512), np.int64), "lengths": np.zeros(64, np.int64)})
    assert payload_bytes(batch) <= 1.02 * ray_bytes(batch)


# Failures.


def failure(rank: int, characters: int, time_ns: int = 0) -> WorkerFailure:
    where = f"dp {rank}, pp 0, tp 0, cp 0", "host", 1000 + rank, "train_step", 7, f"train[{rank}].train_step"
    return WorkerFailure("train", rank, *where, "raised", "m" * characters, "é" * characters + "end", time_ns or rank)


def test_the_cause_keeps_its_traceback_and_all_workers_stay_named() -> None:
    failures = tuple(failure(rank, 16_000, time_ns=100 - rank) for rank in range(64))
    kept = fit_failures(failures, 1 << 18)
    assert [item.rank for item in kept] == list(reversed(range(64)))  # the earliest first
    assert kept[0] == failures[63]
    assert all(item.message == "m" * 200 and item.traceback == "" for item in kept[1:])


@given(count=st.integers(1, 80), characters=st.integers(0, 16_000), limit=st.integers(4096, 1 << 18))
def test_failures_fit_their_channel_whatever_its_size(count: int, characters: int, limit: int) -> None:
    given = tuple(failure(rank + 1, characters) for rank in range(count))
    kept = fit_failures(given, limit)
    assert payload_bytes(kept) <= limit and (kept is given) == (payload_bytes(given) <= limit)
    assert kept[0].rank == 1
    assert kept[0].traceback.endswith("end") or not kept[0].traceback


FIRST = Header("step", 0, False, {"train": 0}, 10.0)


class Worker:
    def gives(self, value: object) -> object:
        return value

    def fails(self, value: object) -> object:
        raise ValueError("x" * 50_000)

    def appends(self, value: object, seen: list[object], options: dict[str, list[object]], step: int) -> object:
        seen.append(value)
        options["seen"].append(value)
        return [list(seen), options["seen"], step]


def worker_of(rank: int = 0) -> Worker:
    worker = Worker()
    install(worker, "train", rank, f"dp {rank}")
    return worker


def call(method: str, limit: int, kind: str = "call", parts: int = 1) -> NodeCall:
    args = tuple(Take(index) for index in range(parts))
    return NodeCall("train", f"train[0].{method}", 0, kind, method, args, {}, 0, False, limit, "the_key")


def run_reduce(worker: Worker, limit: int, group: list[Packet]) -> Packet:
    state_of(worker).gate.reset(0)  # each node of the tree would be on a worker of its own
    return run_node(worker, call("gives", limit, "reduce", len(group)), *group)


@pytest.mark.parametrize("limit", [8192, 1 << 16, 1 << 20])
def test_a_tree_of_failing_workers_never_outgrows_its_channels(limit: int) -> None:
    packets = []
    for rank in range(64):
        worker = worker_of(rank)
        packets.append(run_node(worker, call("fails", limit), Packet(FIRST, 1)))
    while len(packets) > 1:
        groups = [packets[start : start + 8] for start in range(0, len(packets), 8)]
        packets = [run_reduce(worker, limit, group) for group in groups]
        assert all(RAY.serialize(packet).total_bytes <= limit for packet in packets)
    assert packets[0].failures[0].rank == 0
    assert "ValueError: x" in packets[0].failures[0].message


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (bytes(10_000), "needs 14160 bytes, but its channel has room for 8192; raise the_key to at least 14160"),
        (threading.Lock(), "cannot pickle"),
    ],
    ids=["too large", "no pickle"],
)
def test_a_result_that_cannot_be_sent_is_a_failure_without_it(value: object, words: str) -> None:
    found = run_node(worker_of(), call("gives", 8192), Packet(FIRST, value))
    assert found.value is None and words in found.failures[0].message


# Tickets.


PLACES = (1, 3, 2, 5, 1, 4) * 4  # how many nodes the worker has in the replay of each ticket


@pytest.mark.parametrize("seed", range(5))
def test_nodes_run_in_the_order_of_tickets_and_places_on_any_thread(seed: int) -> None:
    gate, served, inside = TicketGate(), [], threading.Semaphore(1)
    random = np.random.default_rng(seed)

    def node(ticket: int, place: int, after_s: float) -> None:
        time.sleep(after_s)
        gate.enter(ticket, place, 30.0)
        assert inside.acquire(blocking=False), "two nodes at once"
        served.append((ticket, place))
        time.sleep(0.0005)
        inside.release()
        gate.leave(ticket, place, closes=place == PLACES[ticket] - 1)

    nodes = [(ticket, place) for ticket, count in enumerate(PLACES) for place in range(count)]
    shuffled = [nodes[at] for at in random.permutation(len(nodes))]
    with ThreadPoolExecutor(len(nodes)) as pool:
        for done in [pool.submit(node, *item, random.uniform(0, 0.02)) for item in shuffled]:
            done.result(60.0)
    assert served == nodes


def late(gate: TicketGate, ticket: int, place: int, words: str, timeout_s: float = 0.01) -> None:
    """A turn that does not come up is an error by its deadline."""
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=words):
        gate.enter(ticket, place, timeout_s)
    assert time.monotonic() - started < 5.0


def test_a_turn_that_does_not_come_up_is_an_error_by_its_deadline() -> None:
    late(TicketGate(), 2, 0, "for ticket 2, while ticket 0 is running")
    late(TicketGate(), 0, 2, "for ticket 0, while node 0 of it had not ended")


def test_a_ticket_that_has_passed_is_an_error() -> None:
    gate = TicketGate()
    gate.enter(0, 0, 1.0)
    gate.leave(0, 0, closes=False)
    with pytest.raises(RunError, match="node 0 of ticket 0 arrived when node 1 of ticket 0 was next; recompile"):
        gate.enter(0, 0, 1.0)
    gate.enter(0, 1, 1.0)
    gate.leave(0, 1, closes=True)
    with pytest.raises(RunError, match="node 2 of ticket 0 arrived when node 0 of ticket 1 was next; recompile"):
        gate.enter(0, 2, 1.0)


def test_only_a_reset_and_the_node_inside_change_the_turn() -> None:
    """Not a node whose turn has not come, one that a reset has skipped, or one that leaves twice."""
    gate = TicketGate()
    gate.enter(0, 0, 1.0)
    gate.leave(3, 0, closes=True)
    late(gate, 4, 0, "while ticket 0 is running")
    waiting = threading.Thread(target=gate.enter, args=(6, 0, 10.0))
    waiting.start()
    gate.reset(6)
    waiting.join(5.0)
    assert not waiting.is_alive()
    for ticket in (0, 6, 6, 3):
        gate.leave(ticket, 0, closes=True)
    gate.enter(7, 0, 0.1)


def test_a_missed_turn_is_skipped_when_its_predecessors_end() -> None:
    gate = TicketGate()
    gate.enter(0, 0, 1.0)
    late(gate, 1, 0, "while ticket 0 is running")
    late(gate, 1, 1, "the turn of ticket 1 did not come in time", 600.0)  # at once: nothing is left of it
    late(gate, 2, 0, "while ticket 0 is running")
    gate.leave(0, 0, closes=True)
    gate.enter(3, 0, 0.1)


def test_a_missed_place_ends_its_ticket_but_not_the_running_node() -> None:
    gate = TicketGate()
    gate.enter(0, 0, 1.0)
    late(gate, 0, 1, "node 0 of it had not ended")
    late(gate, 1, 0, "while ticket 0 is running")
    gate.leave(0, 0, closes=False)
    late(gate, 0, 2, "ticket 0 did not come in time", 600.0)
    gate.enter(2, 0, 0.1)


def test_nodes_that_arrive_in_order_do_not_wait_for_a_lost_one() -> None:
    """Ray does not run a node whose argument is lost. If nodes arrive in order, later ones need not wait for it."""
    gate = TicketGate()
    gate.enter(0, 2, 0.01, in_order=True)
    gate.leave(0, 2, closes=True)
    with pytest.raises(DeadlineError, match="while ticket 1 is running"):
        gate.enter(2, 0, 0.01, in_order=True)
    with pytest.raises(RunError, match="node 3 of ticket 0 arrived when"):
        gate.enter(0, 3, 0.01, in_order=True)


def test_a_replay_that_misses_its_turn_does_not_abort_the_running_one() -> None:
    worker = worker_of()
    worker.abort = Mock()  # type: ignore[attr-defined]
    gate = state_of(worker).gate
    gate.enter(0, 0, 1.0)
    late = dataclasses.replace(call("gives", 8192), closes_turn=True)
    failed = run_node(worker, late, Packet(Header("behind", 3, False, {"train": 1}, 0.01), "x"))
    assert "waited" in failed.failures[0].message and not worker.abort.called  # type: ignore[attr-defined]
    gate.leave(0, 0, closes=True)
    assert run_node(worker, late, Packet(Header("next", 4, False, {"train": 2}, 10.0), "y")).value == "y"


def test_tickets_of_a_header_are_one_for_all_or_one_each() -> None:
    header = Header("step", 0, False, {"train": 4, "generation": (7, 8)}, 10.0)
    assert [header.ticket("train", position) for position in (0, 3)] == [4, 4]
    assert [header.ticket("generation", position) for position in (0, 1)] == [7, 8]


@pytest.mark.parametrize("rows", [0, 3, 1000])
def test_a_batch_arrives_as_it_was_sent(rows: int) -> None:
    fields = {
        "tokens": np.arange(rows * 5, dtype=np.int32).reshape(rows, 5),
        "lengths": np.full(rows, 5),
        "texts": np.array(["ab"] * rows, dtype="U3"),
        "columns": np.asfortranarray(np.ones((rows, 4))) * np.arange(4),
    }
    packet = Packet(Header("phase", 3, False, {"train": 1}, 10.0), Batch(fields, {"slope": 0.5}), 0.25)
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(packet.wire(), protocol=5, buffer_callback=buffers.append)
    assert bool(buffers) == (rows == 1000), "large arrays are sent next to the pickle, without a copy"
    found = Packet.from_wire(pickle.loads(pickled, buffers=[bytearray(buffer.raw()) for buffer in buffers]))  # noqa: S301
    assert found._replace(value=None) == packet._replace(value=None)
    assert isinstance(found.value, Batch) and found.value.scalars == {"slope": 0.5}
    for name, array in fields.items():
        np.testing.assert_array_equal(found.value[name], array)
        assert found.value[name].dtype == array.dtype and found.value[name].flags.writeable


@phase
def appends(train: Shard, value):
    return train.map("appends", value, [0], options={"seen": []}, step=3)


def test_constants_are_each_replays_own() -> None:
    worker = worker_of()
    graph = appends.trace({"train": Role("train", ParallelLayout(), methods_of(Worker))})
    (node,) = node_calls(graph, GraphLimits(1 << 12, 1 << 20, 1, 1.0, 1.0, 1.0))
    for replay in range(3):
        packet = Packet(Header("appends", replay, False, {"train": replay}, 10.0), replay)
        assert run_node(worker, node, packet).value == [[0, replay], [replay], 3]


HEADER = Header("phase", 7, True, {"train": (1, 2)}, 10.0)
NEWER = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16", "uint32", "uint64", "complex32"]


@dataclass
class Holding:
    tensor: torch.Tensor


def test_a_class_that_the_reader_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(Packet(HEADER, Holding(torch.zeros(2))).wire())
    monkeypatch.delattr("tests.unit.runtime.test_packet.Holding")
    with pytest.raises(UnreadableError, match=r"Can't get attribute 'Holding'.* when a value was unpickled; send"):
        load(pickled)


@pytest.mark.parametrize("name", NEWER)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_torchs_newer_dtypes_fit_their_size(name: str) -> None:
    raw = torch.arange(96, dtype=torch.uint8)
    tensor = raw.view(getattr(torch, name)).view(-1, 2)[1:].t()
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    for value in (tensor, {"a": [tensor, 1]}, Holding(tensor), parameter):
        limit = payload_bytes(value)
        parts = dump(value)
        assert sum(map(len, parts)) <= limit
        found = load(parts[0], parts[1:])
        one = found["a"][0] if isinstance(found, dict) else found.tensor if isinstance(found, Holding) else found
        assert (one.dtype, one.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(one.t().contiguous().view(torch.uint8), tensor.t().contiguous().view(torch.uint8))


def test_a_process_that_has_sized_nothing_writes_readable_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay is such a process: it passes on what it has read."""
    monkeypatch.delitem(copyreg.dispatch_table, torch.UntypedStorage, raising=False)
    pickled, *buffers = dump(torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn))
    assert load(pickled, buffers).view(torch.uint8).tolist() == [0, 1, 2, 3]


@given(
    shape=st.lists(st.integers(0, 4), max_size=7),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint16]),
    cut=st.sampled_from(["whole", "rows", "columns", "transposed", "expanded", "conjugate"]),
    in_band=st.booleans(),
    grad=st.booleans(),
)
def test_tensors_arrive_as_they_were(shape: list[int], dtype: torch.dtype, cut: str, in_band: bool, grad: bool) -> None:
    whole = torch.arange(math.prod(shape)).to(dtype).view(shape)
    cuts = {"rows": whole[1:], "columns": whole[:, 1:]} if len(shape) > 1 else {}
    cuts |= {"transposed": whole.permute(tuple(reversed(range(len(shape))))), "expanded": whole.expand(2, *shape)}
    tensor = (cuts | {"conjugate": whole.conj()}).get(cut, whole)
    if grad and dtype.is_floating_point:
        tensor = tensor.detach().requires_grad_()
    value, limit = {"a": [tensor, tensor]}, payload_bytes({"a": [tensor, tensor]})
    pickled, *buffers = dump(value, in_band=in_band)
    assert sum(map(len, (pickled, *buffers))) <= limit and len(pickle.dumps(value, protocol=5)) <= limit
    assert payload_bytes(tensor) <= 3 * (tensor.nbytes or whole.nbytes) + 2048  # of an empty part, that of the whole
    found, same = load(pickled, [bytearray(buffer) for buffer in buffers])["a"]
    assert found is same and bool(buffers) == (not in_band and not tensor.is_conj())
    assert (found.dtype, found.shape, found.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
    assert torch.equal(found.to(torch.complex64), tensor.to(torch.complex64))


def test_a_part_of_a_tensor_is_sent_alone_and_used_in_place() -> None:
    rows = torch.arange(40_000.0).view(8, 5000)
    pickled, buffer = dump(rows[2:3])
    assert len(pickled) + len(buffer) < 4 * 5000 + 1000
    theirs = bytearray(buffer)
    found = load(pickled, [theirs])
    found.zero_()
    assert not any(theirs), "the tensor is a view of the message"
    shared = load(pickled, [memoryview(buffer).toreadonly()])
    shared.zero_()
    assert rows[2, 1] == 10_001.0, "what others read too is copied"


def test_accelerator_tensors_are_found_in_containers() -> None:
    here, there = torch.zeros(2), torch.zeros(3, device="meta")  # any device that is not the CPU
    value = {"a": [there, here], "b": (1, None, "c", np.zeros(2)), "d": there}
    assert [id(tensor) for tensor in accelerator_tensors(value)] == [id(there), id(there)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [torch.zeros(3, 2, device="meta").T], r"shape \(2, 3\) and strides \(1, 2\).*return tensor.contiguous"),
        (lambda: StepMetrics(), "a StepMetrics cannot be sent from GPU to GPU"),
    ],
)
def test_tensors_that_cannot_go_over_an_accelerator_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        accelerator_tensors(make())
