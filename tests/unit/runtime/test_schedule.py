"""The scheduler over graphs that run nowhere: what it refuses, what it says after a failure, what it leaves consistent."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ray import ObjectRef
from ray.exceptions import RayChannelError

from dagrl.errors import DataError, DeadlineError, GraphError, LayoutError, PhaseError, RunError
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.edges.packet import Packet
from dagrl.runtime.executors.base import Actors, GraphLimits, Nodes
from dagrl.runtime.graph import PhaseGraph
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Input, Phase, Role, Shard, Value, join, methods_of, phase
from dagrl.runtime.replay import Replay
from dagrl.runtime.schedule import SETTLING_REPLAYS, Scheduler, SchedulerOptions
from dagrl.runtime.shapes import Batch, Bucket, Field
from dagrl.runtime.split import Codec
from dagrl.runtime.worker_group import WorkerGroup
from tests.unit.runtime.doubles import Both

BATCH = {"x": Field("int64"), "lengths": Field("int64", "row")}


@phase(inputs=BATCH)
def step(train: Shard, batch):
    return train.map("forward", batch)


def maps(name: str, *roles: str, inputs: Mapping[str, Field] | None = None) -> Phase:
    """A phase that maps `forward` over the shards of these roles."""

    def function(value: Input, **shards: Shard) -> Value:
        values = [shard.map("forward", value) for shard in shards.values()]
        return join(*values) if len(values) > 1 else values[0]

    return Phase(name, function, inputs, roles)


other, coded, scores = maps("other", "train"), maps("coded", "train"), maps("scores", "train", inputs={})
elsewhere, both = maps("elsewhere", "reference"), maps("both", "train", "reference")
produce, send = maps("produce", "generation", inputs=BATCH), maps("send", "train", "generation")


class Graph:
    """A graph whose replays give what the test says; `taken` are the packets that were sent."""

    def __init__(self, graph: PhaseGraph, limits: GraphLimits, made: list[Graph]) -> None:
        self.phase, self.limits, self.widths = graph.phase, limits, graph.widths
        self.taken: list[Packet] = []
        self.results: list[Any] = []
        self.gone, self.stays = threading.Event(), True
        self.meet: threading.Barrier | None = None
        self.executor = 0
        made.append(self)

    def submit(self, packet: Packet) -> Packet:
        if self.results and isinstance(self.results[0], TypeError):
            raise self.results.pop(0)
        self.taken.append(packet)
        return packet

    def fetch(self, submitted: Packet, timeout_s: float) -> Packet:
        if not self.results:
            self.gone.wait(timeout_s)
            raise TimeoutError
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return Packet(submitted.header, result)

    def failures(self, submitted: Packet) -> list[Any]:
        return []

    @property
    def reusable(self) -> bool:
        return self.stays and not self.gone.is_set()

    def teardown(self, timeout_s: float) -> None:
        if self.meet is not None:
            self.meet.wait(60.0)
        self.gone.set()


class Group:
    """Two train workers that stand nowhere."""

    owned = True

    def __init__(self, dp: int = 2, name: str = "train") -> None:
        self.layout = ParallelLayout(dp=dp)
        self.role = Role(name, self.layout, methods_of(Both), frozenset({"shm"}))
        self.actors = [SimpleNamespace(_actor_id=object()) for _ in range(dp)]
        self.locations = [SimpleNamespace(node=f"host{rank}") for rank in range(dp)]  # a graph each
        self.gates: list[list[int]] = []
        self.passed: list[list[int]] = []
        self.out_of_service: set[int] = set()

    def reset_tickets(self, tickets: Sequence[int], deadline: Deadline) -> None:
        self.gates.append([ticket for rank, ticket in enumerate(tickets) if rank not in self.out_of_service])

    def pass_tickets(self, tickets: Sequence[int]) -> None:
        self.passed.append(list(tickets))

    rank_of_actor, reports, abort, kill = Mock(return_value=None), Mock(return_value={}), Mock(), Mock()


class Executors:
    """Stands for `executor_of`, whose graphs are `made`, in order. Executors named `fails` compile `first` graphs alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: str = "", first: int = 0) -> None:
        self.made, self.names, self.fails, self.first = list[Graph](), list[str](), fails, first
        monkeypatch.setattr("dagrl.runtime.schedule.executor_of", self.executor_of)

    def executor_of(self, name: str, engine: str) -> Any:
        number = len(self.names)
        self.names.append(name)

        def compile_(graph: PhaseGraph, actors: Actors, nodes: Nodes, limits: GraphLimits) -> Graph:
            if name == self.fails and len(self.made) >= self.first:
                raise RuntimeError(f"{name} cannot")
            made = Graph(graph, limits, self.made)
            made.executor, made.stays = number, name != "eager"
            return made

        return compile_


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that were compiled, in order."""
    return Executors(monkeypatch).made


@pytest.fixture
def group() -> Group:
    return Group()


def compiled(*groups: Group, phases: Sequence[Phase] = (other,), **options: Any) -> Scheduler:
    """A scheduler whose phases are compiled, those of batches with one bucket."""
    scheduler = Scheduler(list(groups), SchedulerOptions(**options))  # type: ignore[arg-type]
    for item in phases:
        if item.inputs:
            scheduler.add(item, buckets=[Bucket(4, 4)])
        else:
            scheduler.add(item, warmup_value=0)
    scheduler.compile()
    return scheduler


@pytest.fixture
def scheduler(group: Group, made: list[Graph]) -> Iterator[Scheduler]:
    with compiled(group, phases=(step, other)) as scheduler:
        yield scheduler


def batch(rows: int) -> Batch:
    return Batch({"x": np.arange(4 * rows).reshape(rows, 4), "lengths": np.full(rows, 4)})


def tickets_of(graph: Graph) -> list[Any]:
    return [packet.header.tickets["train"] for packet in graph.taken]


X, LENGTHS = np.zeros((2, 4), np.int64), np.full(2, 4)
ROWS = [
    ([[0, 1, 2]], "2 shards, but `rows` has 1 arrays"),
    ([[0], [1], [2]], "2 shards, but `rows` has 3 arrays"),
    *((rows, "position from 0 to 2 exactly once") for rows in ([[0, 1], [1]], [[0, 1], [3]], [[0], [1]])),
]
FIELDS = [
    (None, r"'step' takes a batch of lengths int64 \[rows\], x int64 \[rows, tokens\]; it was given a NoneType"),
    ({"x": X, "lengths": LENGTHS}, "it was given a dict"),
    (Batch({"lengths": LENGTHS}), r"batch of phase 'step' lacks x int64 \[rows, tokens\]\. Convert, add"),
    (Batch({"x": X, "lengths": LENGTHS, "y": X}), r"'step' has y int64 \[rows, tokens\], not among its `inputs`"),
    (Batch({"x": X.astype("float32"), "lengths": LENGTHS}), r"lacks x int64 .* and has x float32 \[rows, tokens\]"),
    (Batch({"x": X, "lengths": LENGTHS.astype("int32")}), r"lacks lengths int64 \[rows\] and has lengths int32"),
    (Batch({"x": X[:, 0], "lengths": LENGTHS}), r"lacks x int64 \[rows, tokens\] and has x int64 \[rows\]"),
    (Batch({"x": X[:, :3], "lengths": LENGTHS}), r"`lengths` from 4 to 4, but its fields hold .*: \{'x': 3\}"),
    (Batch({"x": X, "lengths": LENGTHS - [0, 5]}), "`lengths` from -1 to 4"),
]
UNPICKLABLE = [
    (ObjectRef(b"1" * ObjectRef.size()), r"an ObjectRef cannot be sent .* send the value itself, ray.get"),
    (threading.Lock(), r"a lock cannot be pickled \(TypeError: cannot pickle '_thread.lock' object\); send plain data"),
]
DEADLINE = r"deadline_s is .*; expected a finite number of seconds above 0"


@pytest.mark.parametrize(
    ("item", "value", "options", "error", "words"),
    [
        *((step, batch(3), {"rows": [np.array(mine, np.intp) for mine in rows]}, RunError, words) for rows, words in ROWS),
        *((step, value, {}, DataError, words) for value, words in FIELDS),
        *((other, value, {}, RunError, words) for value, words in UNPICKLABLE),
        *((other, {"x": (1, [value])}, {}, RunError, words) for value, words in UNPICKLABLE),
        *((step, Batch({"x": X, "lengths": LENGTHS}, {"x": value}), {}, RunError, words) for value, words in UNPICKLABLE),
        *((other, 1, {"deadline_s": seconds}, RunError, DEADLINE) for seconds in (0.0, -1.0, math.inf, math.nan)),
    ],
)
def test_bad_input_is_refused_before_sending(
    scheduler: Scheduler, made: list[Graph], item: Phase, value: Any, options: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        scheduler.replay(item, value, **options)
    scheduler.replay(step, batch(3), rows=[np.array([0, 2]), np.array([1])])
    scheduler.replay(other, 1)
    assert [tickets_of(graph) for graph in made] == [[0], [0], [1], [1]]


def test_batches_may_be_empty_and_have_fields_in_any_order(scheduler: Scheduler) -> None:
    scheduler.replay(step, Batch({"lengths": LENGTHS[:0], "x": X[:0]}))


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([X.repeat(2, 0), np.ones((4, 5))], r"'y' has the shape \[4, 5\], .* bucket 4 x 4\. Return \[4\] or \[4, 4\]"),
        ([X.repeat(2, 0), X], r"'lengths' has the shape \[2\]"),
        ([X.repeat(2, 0), None], r"one shard returned the fields \['lengths', 'y'\], another \['lengths'\]"),
    ],
)
def test_bad_results_raise(scheduler: Scheduler, made: list[Graph], shards: list[np.ndarray | None], words: str) -> None:
    replay = scheduler.replay(step, batch(2))
    for graph, y in zip(made, shards, strict=False):
        rows = 4 if y is None else len(y)
        graph.results = [Batch({"lengths": np.ones(rows), **({} if y is None else {"y": y})})]
    for _ in range(2):
        with pytest.raises(PhaseError, match="replay 0: the results of its shards do not fit together: .*" + words):
            replay.result()
    again = scheduler.replay(step, batch(2))
    made[0].results, made[1].results = [1], [2]
    assert again.result() == (1, 2), "the graphs are whole"


def test_token_results_of_a_batch_without_token_fields_are_returned(scheduler: Scheduler, made: list[Graph]) -> None:
    scheduler.add(scores, buckets=[Bucket(2, 4)])
    scheduler.compile()
    replay = scheduler.replay(scores, Batch({"lengths": np.array([2, 3])}))
    for graph in made[-2:]:
        graph.results = [Batch({"lengths": np.ones(2), "y": np.ones((2, 4))})]
    assert replay.result()["y"].shape == (2, 3)


def test_two_phases_of_one_name_are_refused(scheduler: Scheduler) -> None:
    namesake = Phase("step", other.function, None, other.roles)
    with pytest.raises(GraphError, match="'step' was added already"):
        scheduler.add(namesake, warmup_value=0)
    with pytest.raises(RunError, match="another phase of that name"):
        scheduler.replay(namesake, 1)


@pytest.fixture
def colocated(made: list[Graph]) -> Iterator[Scheduler]:
    """Two groups over the same two actors, of one shard and of two."""
    train, reference = Group(), Group(1, name="reference")
    reference.layout = ParallelLayout(tp=2)
    reference.role = Role("reference", reference.layout, methods_of(Both), frozenset({"shm"}))
    reference.actors = train.actors[::-1]
    reference.locations = train.locations
    with compiled(train, reference, phases=(other, elsewhere, both)) as scheduler:
        yield scheduler


def test_groups_over_the_same_actors_share_one_order_of_turns(colocated: Scheduler, made: list[Graph]) -> None:
    for item in (other, elsewhere, both, elsewhere, other):
        colocated.replay(item, 1)
    taken: dict[str, list[Any]] = {}
    for graph in made:
        taken.setdefault(graph.phase, []).append([packet.header.tickets for packet in graph.taken])
    assert taken == {
        "other": [[{"train": 0}, {"train": 4}]] * 2,
        "elsewhere": [[{"reference": 1}, {"reference": 3}]],
        "both": [[{"train": 2, "reference": 2}]],
    }


def test_a_replay_that_is_sent_while_graphs_are_torn_down_says_so(scheduler: Scheduler, made: list[Graph]) -> None:
    """Another thread has seen that the phase is compiled, and waits for the lock meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        with scheduler._lock:
            sent = pool.submit(scheduler.replay, step, batch(8))
            time.sleep(0.1)
            scheduler._teardown()
        with pytest.raises(RunError, match="is not compiled"):
            sent.result(30.0)


def test_an_interrupt_while_tickets_are_taken_breaks_graphs(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers would wait for turns that nobody has."""
    take, taken = scheduler._tickets.take, []

    def interrupted(graph_workers: Any) -> Any:
        taken.append(take(graph_workers))
        if len(taken) == 2:
            raise KeyboardInterrupt
        return taken[-1]

    monkeypatch.setattr(scheduler._tickets, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scheduler.replay(step, batch(8))
    with pytest.raises(PhaseError, match=r"could not be sent to all its workers.*call scheduler.recover\(\)"):
        scheduler.replay(step, batch(8))


@pytest.mark.parametrize(
    ("first_s", "others_s", "replays"),
    [(0.9, 0.001, SETTLING_REPLAYS), (0.06, 0.06, 2), (0.01, 0.03, 4), (1.1, 0.001, 1)],  # cold, slow, quick, very slow
)
def test_warm_up_repeats_depend_on_the_second_replay(
    made: list[Graph], monkeypatch: pytest.MonkeyPatch, first_s: float, others_s: float, replays: int
) -> None:
    now = 0.0
    monkeypatch.setattr("dagrl.runtime.schedule.time", SimpleNamespace(perf_counter=lambda: now, monotonic=time.monotonic))
    with compiled(Group(1)) as scheduler:
        (graph,) = made

        def fetch(submitted: Packet, timeout_s: float) -> Packet:
            nonlocal now
            now += others_s if len(graph.taken) > 1 else first_s
            return Packet(submitted.header, None)

        graph.fetch = fetch  # type: ignore[method-assign]
        scheduler.warmup()
    assert len(graph.taken) == replays


def test_lengths_may_have_any_integer_dtype(made: list[Graph]) -> None:
    short = Phase("short", step.function, BATCH | {"lengths": Field("int32", "row")}, step.roles)
    with compiled(Group(), phases=(short,)) as scheduler:
        for graph in made:
            graph.results = [None] * SETTLING_REPLAYS
        scheduler.warmup()
    assert {packet.value["lengths"].dtype for packet in made[0].taken} == {np.dtype("int32")}  # type: ignore[index]


def test_a_deadline_holds_while_another_thread_waits(scheduler: Scheduler, made: list[Graph]) -> None:
    replay = scheduler.replay(other, 1)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(replay.result)
        time.sleep(0.1)
        with pytest.raises(DeadlineError):
            replay.result(timeout_s=0.05)
        assert not waits.done()
        for graph in made[2:]:
            graph.results = [1]
        assert waits.result(60.0) == replay.result(timeout_s=0.0) == (1, 1)


class Counted:
    """Stands for a graph's `submit` and `fetch`, which may take a while; `most` replays were sent and not read at once."""

    def __init__(self, graph: Graph) -> None:
        self.sending, self.go_on = threading.Event(), threading.Event()
        self.counting = threading.Lock()
        self.now = self.most = 0
        graph.submit, graph.fetch = self.submit, self.fetch  # type: ignore[method-assign]

    def submit(self, packet: Packet) -> Packet:
        with self.counting:
            self.now += 1
            self.most = max(self.most, self.now)
        self.sending.set()
        assert self.go_on.wait(60.0)
        return packet

    def fetch(self, submitted: Packet, timeout_s: float) -> Packet:
        time.sleep(0.001)
        with self.counting:
            self.now -= 1
        return Packet(submitted.header, submitted.value)


def test_concurrent_submits_respect_max_in_flight(scheduler: Scheduler, made: list[Graph]) -> None:
    """Five look for room while the first is being sent, and is not in flight yet."""
    counted = Counted(made[2])
    made[3].fetch = lambda submitted, timeout_s: Packet(submitted.header, 0)  # type: ignore[method-assign]
    with ThreadPoolExecutor(6) as pool:
        sent = [pool.submit(scheduler.replay, other, 1)]
        assert counted.sending.wait(60.0)
        sent += [pool.submit(scheduler.replay, other, 1) for _ in range(5)]
        time.sleep(0.1)
        counted.go_on.set()
        replays = [one.result(60.0) for one in sent]
    assert counted.most == scheduler.options.max_in_flight == 2
    assert len({replay.number for replay in replays}) == 6 and [replay.result() for replay in replays] == [(1, 0)] * 6


def test_a_partly_sent_replay_breaks_the_graphs(scheduler: Scheduler, made: list[Graph]) -> None:
    """The next replay raises at once, even with the queue full."""
    for _ in range(2):
        scheduler.replay(other, 1)
    made[1].results = [TypeError("cannot be sent")]
    with pytest.raises(TypeError):
        scheduler.replay(step, batch(2))
    started = time.monotonic()
    with pytest.raises(PhaseError, match=r"replay 0 of phase 'step' could not be sent to all .*recover") as caught:
        scheduler.replay(other, 1)
    assert caught.value.breaks and time.monotonic() - started < 60.0  # the deadline of those in flight is 120 s


def test_warm_up_replays_every_bucket_the_largest_first(group: Group, made: list[Graph]) -> None:
    """Otherwise smaller buckets would fragment the memory that the largest needs."""
    scheduler = Scheduler([group], SchedulerOptions(warmup_s=7.0))  # type: ignore[list-item]
    scheduler.add(step, buckets=[Bucket(1, 4), Bucket(4, 8), Bucket(3, 2), Bucket(2, 8)], scalars={"lr": 0.5}, token_ids=9)
    scheduler.compile()
    for graph in made:
        graph.fetch = lambda submitted, timeout_s: Packet(submitted.header, 0)  # type: ignore[method-assign]
    told: list[int] = []
    assert list(scheduler.warmup(lambda phase: told.append(sum(len(graph.taken) for graph in made)))) == ["step"]
    assert told == [0], "before the first replay"
    for graph in made:
        assert all(packet.header.warmup and packet.header.deadline_s == 7.0 for packet in graph.taken)
        sent = list(dict.fromkeys((packet.value.rows, *packet.value["lengths"].tolist()) for packet in graph.taken))
        assert sent == [(4, *[8] * 4), (2, *[8] * 2), (3, *[2] * 3), (1, 4)]
        assert {packet.value.number("lr") for packet in graph.taken} == {0.5}
    scheduler.close()


def test_the_first_breakage_is_reported_despite_later_failures(scheduler: Scheduler, made: list[Graph]) -> None:
    """One of them fails alone, and one breaks another graph."""
    broken, failing, last = scheduler.replay(other, 1), scheduler.replay(step, batch(2)), scheduler.replay(step, batch(2))
    made[2].results, made[3].results = [KeyError("first")], [1]
    made[0].results, made[1].results = [batch(1), KeyError("later")], [Batch({"lengths": np.ones(1)}), 1]
    for replay in (broken, failing, last):
        with pytest.raises(PhaseError):
            replay.result()
    with pytest.raises(PhaseError, match="the graph of phase 'other' broke; call"):
        scheduler.replay(step, batch(2))


def test_an_interrupted_replay_leaves_the_queue(made: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes after the result was read."""
    succeed = Replay.succeed

    def interrupted(replay: Replay, packets: Any) -> None:
        succeed(replay, packets)
        raise KeyboardInterrupt

    with compiled(Group(1), max_in_flight=1) as scheduler:
        made[0].results = [1, 2]
        replay = scheduler.replay(other, 1)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Replay, "succeed", interrupted)
            replay.result()
        assert scheduler.replay(other, 1).result() == (2,) and replay.result() == (1,)


def test_a_teardown_during_a_read_ends_it(scheduler: Scheduler, made: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.runtime.failures.GRACE_S", 0.1)
    replay = scheduler.replay(other, 1)

    def closed(submitted: Packet, timeout_s: float) -> Packet:
        scheduler.recover()
        raise ValueError("what it was read from is closed")

    made[2].fetch = closed  # type: ignore[method-assign]
    with pytest.raises(PhaseError, match="under way when its graphs were torn down"):
        replay.result()
    again = scheduler.replay(other, 1)
    for graph in made[-2:]:
        graph.results = [1]
    assert again.result() == (1, 1)


@pytest.mark.parametrize("end", ["recover", "close"])
def test_a_replay_under_way_when_its_graphs_end_says_so(scheduler: Scheduler, end: str) -> None:
    replay = scheduler.replay(step, batch(2))
    getattr(scheduler, end)()
    with pytest.raises(PhaseError, match="'step', replay 0 was under way when its graphs were torn down"):
        replay.result()


def test_turns_begin_where_the_schedulers_replays_do(scheduler: Scheduler, group: Group, made: list[Graph]) -> None:
    scheduler.replay(step, batch(2))
    scheduler.compile()  # nothing new, and turns are being waited for
    assert group.gates == [[0, 0]] and len(made) == 4 and not group.passed
    scheduler.recover()
    assert group.passed == [[1, 1]], "workers that wait for a turn of the replay under way give up"
    scheduler.recover()
    assert group.passed == [[1, 1]], "none was under way"
    scheduler.close()
    compiled(group)
    assert group.gates == [[0, 0], [1, 1], [1, 1], [0, 0]]


def test_a_second_scheduler_waits_for_the_end_of_the_first(scheduler: Scheduler, group: Group, made: list[Graph]) -> None:
    """Compares actors, since two groups may wrap the same ones. Refuses before anything on them changes."""
    compiled, same_actors = len(made), Group()
    same_actors.actors = [*group.actors[1:], *same_actors.actors[1:]]
    for again in (group, same_actors):
        second = Scheduler([Group(name="generation"), again])  # type: ignore[list-item]
        second.add(other, warmup_value=0)
        with pytest.raises(RunError, match=r"actors of train run the phases step, other of another Scheduler.*close"):
            second.compile()
    assert (len(made), group.gates, same_actors.gates) == (compiled, [[0, 0]], [])
    scheduler.replay(step, batch(2))
    scheduler.close()
    second.compile()
    with pytest.raises(RunError, match="'other' is not compiled"):
        scheduler.replay(other, 1)
    scheduler.add(other, warmup_value=0)
    with pytest.raises(RunError, match="the phases other of another Scheduler"):
        scheduler.compile()
    second.close()
    scheduler.compile()


def test_graphs_are_torn_down_at_once(scheduler: Scheduler, made: list[Graph]) -> None:
    """Each graph has the whole teardown deadline."""
    meet = threading.Barrier(len(made))
    for graph in made:
        graph.meet = meet
    scheduler.close()
    assert all(graph.gone.is_set() for graph in made) and not meet.broken


@pytest.mark.parametrize(("fails", "options"), [("compiled", {"fallback": "error"}), ("eager", {"executor": "eager"})])
def test_a_partial_compile_leaves_no_graph_behind(monkeypatch: pytest.MonkeyPatch, fails: str, options: Any) -> None:
    made = Executors(monkeypatch, fails=fails, first=1).made
    with pytest.raises(RunError, match=f"'other' could not be compiled: {fails} cannot"):
        compiled(Group(), **options)
    assert [graph.gone.is_set() for graph in made] == [True]


def test_options_reach_graphs_and_replays(made: list[Graph]) -> None:
    seconds: Any = {"compile_s": 11.0, "replay_s": 12.0, "grace_s": 13.0, "teardown_s": 14.0}
    options = SchedulerOptions(max_in_flight=3, result_bytes=5 << 20, **seconds)
    own = Phase("own", other.function, None, other.roles)
    with Scheduler([Group(1)], options) as scheduler:  # type: ignore[list-item]
        scheduler.add(other, warmup_value=0)
        scheduler.add(own, warmup_value=0, input_bytes=7 << 20, result_bytes=6 << 20)
        scheduler.compile()
        limits, mine = (graph.limits for graph in made)
        assert (limits.max_in_flight, limits.compile_s, limits.replay_s, limits.teardown_s) == (3, 11.0, 12.0, 14.0)
        assert (limits.result_bytes, mine.result_bytes, mine.input_bytes) == (5 << 20, 6 << 20, (7 << 20) + (1 << 15))
        assert mine.result_key == "result_bytes of Scheduler.add(own)"
        assert limits.result_key == "SchedulerOptions.result_bytes, or result_bytes of Scheduler.add(other),"
        replay = scheduler.replay(other, 1)
        scheduler.replay(other, 1, deadline_s=600.0)
        assert [packet.header.deadline_s for packet in made[0].taken] == [12.0, 600.0] and replay.pending.grace_s == 13.0
        torn: list[float] = []
        made[0].teardown = torn.append  # type: ignore[method-assign]
    assert torn == [14.0]


def test_joining_groups_keep_existing_graphs_and_tickets(scheduler: Scheduler, group: Group, made: list[Graph]) -> None:
    scheduler.replay(other, 1)
    graphs, late = list(made), Group(name="reference")
    scheduler.join([late])  # type: ignore[list-item]
    scheduler.add(elsewhere, warmup_value=0)
    scheduler.add(both, warmup_value=0)
    scheduler.compile()
    assert made[: len(graphs)] == graphs and {graph.phase for graph in made[len(graphs) :]} == {"elsewhere", "both"}
    assert (group.gates, late.gates) == ([[0, 0]], [[0, 0]]), "the workers that run are not reset"
    scheduler.replay(elsewhere, 1)
    scheduler.replay(both, 1)
    assert [graph.taken[0].header.tickets for graph in made if graph.phase == "both"] == [{"train": 1, "reference": 1}] * 2


def test_groups_have_no_actor_twice_and_none_of_another(scheduler: Scheduler, group: Group) -> None:
    actors: list[Any] = [SimpleNamespace(_actor_id=name) for name in "abca"]
    with pytest.raises(LayoutError, match="ranks 0 and 3 of role 'train' are the same actor"):
        WorkerGroup.from_actors(actors, ParallelLayout(dp=4))
    late = Group(name="reference")
    late.actors[1] = group.actors[0]
    with pytest.raises(LayoutError, match="the reference group joins a scheduler that has groups on its actors"):
        scheduler.join([late])  # type: ignore[list-item]
    with pytest.raises(LayoutError, match=r"2 groups have the role 'train'.*from_actors\(\.\.\., role=\.\.\.\)"):
        scheduler.join([Group()])  # type: ignore[list-item]
    assert list(scheduler.groups) == ["train"]


def test_a_phase_that_cannot_compile_runs_eagerly(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One executor, which orders its calls, makes all eager graphs; a recovery makes them again with a new one."""
    executors = Executors(monkeypatch, fails="compiled")
    with compiled(Group(1), phases=(step, other)) as scheduler:
        assert "phase 'other' could not be compiled and runs eagerly: compiled cannot" in caplog.text
        first, second = (graph.executor for graph in executors.made)
        assert first == second and executors.names[first] == "eager"
        scheduler.recover()
        assert len({graph.executor for graph in executors.made}) == 2 and len(executors.made) == 4


def test_a_graph_with_any_worker_of_somebody_else_kills_none(made: list[Graph]) -> None:
    ours, theirs = Group(1), Group(1, "generation")
    theirs.owned = False
    with compiled(ours, theirs, phases=(send,)):
        assert [graph.limits.may_kill for graph in made] == [False]


def test_recover_keeps_idle_graphs_on_unchanged_workers(scheduler: Scheduler, group: Group, made: list[Graph]) -> None:
    """Four graphs at first: `step` on shards 0 and 1, then `other`."""
    made[0].results, made[1].results = [1], [RayChannelError("closed")]
    with pytest.raises(PhaseError, match="closed"):
        scheduler.replay(step, batch(2)).result()
    assert scheduler.recover() == {"step": [1]} and len(made) == 5
    assert [graph.gone.is_set() for graph in made] == [False, True, False, False, False]
    group.actors[0] = SimpleNamespace(_actor_id=object())
    assert scheduler.recover() == {"step": [0], "other": [0]} and len(made) == 7
    assert [graph.gone.is_set() for graph in made] == [True, True, True, False, False, False, False]
    scheduler.replay(other, 1)
    assert scheduler.recover() == {"other": [0, 1]}
    assert scheduler.recover() == {} and group.gates[-1] == [2, 2]


def test_a_codec_splits_over_the_shards_that_have_workers(scheduler: Scheduler, made: list[Graph]) -> None:
    scheduler.add(coded, warmup_value="ab", codec=Codec(lambda text, count: [text] * count, list))
    scheduler.compile()
    made[-2].stays = False
    scheduler.groups["train"].out_of_service.add(0)
    scheduler.recover(["train"])
    replay = scheduler.replay(coded, "ab")
    made[-1].results = ["c"]
    assert replay.result() == ["c"] and made[-1].taken[-1].value.load() == "ab"


@pytest.mark.parametrize("rows", [None, [np.array([], np.intp), np.array([1, 0])]])
def test_batches_without_a_shard_keep_order(scheduler: Scheduler, made: list[Graph], rows: list[np.ndarray] | None) -> None:
    made[0].stays = False
    scheduler.groups["train"].out_of_service.add(0)
    scheduler.recover(["train"])
    replay = scheduler.replay(step, batch(2), rows=rows)
    taken = made[1].taken[-1].value
    made[1].results = [taken]
    found = replay.result()
    assert replay.shards == [1] and taken["x"].shape == (4, 4)
    assert found["x"].tolist() == batch(2)["x"].tolist()


def test_other_roles_and_shards_go_on_after_a_failure(made: list[Graph]) -> None:
    train, generation = Group(1), Group(2, "generation")
    with compiled(train, generation, phases=(other, produce, send)) as scheduler:
        working, (first, second) = made[0], made[1:3]
        learning = scheduler.replay(other, 1)
        first.results, second.results = ["made"], [RayChannelError("closed")]
        failed = scheduler.replay(produce, batch(2), rows=[np.array([0]), np.array([1])])
        with pytest.raises(PhaseError, match="closed"):
            failed.result()
        assert failed.partial() == {0: "made"} and scheduler.broken == ("generation",)
        with pytest.raises(PhaseError, match="recover"):
            scheduler.replay(send, 1)

        gates = len(train.gates), len(generation.gates)
        generation.out_of_service.add(1)
        assert scheduler.recover(["generation"]) == {}
        assert (len(train.gates), len(generation.gates)) == (gates[0], gates[1] + 1)
        assert generation.gates[-1] == [1], "the absent worker cannot answer"
        assert [graph.gone.is_set() for graph in made] == [False, False, True, True]
        assert not learning.done
        with pytest.raises(RunError, match="'send' is not compiled"):
            scheduler.replay(send, 1)
        with pytest.raises(RunError, match="runs on 1 shards"):
            scheduler.replay(produce, batch(2), rows=[np.array([0]), np.array([1])])
        first.results = ["more"]
        replay = scheduler.replay(produce, batch(2), rows=[np.array([0, 1]), np.array([], np.intp)])
        assert replay.result() == ("more",) and replay.shards == [0]

        generation.out_of_service.clear()
        assert scheduler.recover(["generation"]) == {"produce": [1], "send": [0]}
        working.results = ["learned"]
        assert learning.result() == ("learned",)
        assert not first.gone.is_set() and not working.gone.is_set()


def test_input_channels_are_sized_by_the_largest_bucket(made: list[Graph]) -> None:
    full = Batch({"x": np.zeros((128, 64), np.int64), "lengths": np.full(128, 64)})
    with Scheduler([Group()]) as scheduler:  # type: ignore[list-item]
        scheduler.add(step, buckets=[Bucket(1, 64), Bucket(64, 64)])
        scheduler.add(other, warmup_value=np.zeros(1000))
        scheduler.compile()
        scheduler.replay(step, full)
        scheduler.replay(other, np.zeros(1000))
        with pytest.raises(RunError, match=r"input of phase 'other' needs .* bytes per shard, .* or add a larger bucket"):
            scheduler.replay(other, np.zeros(3000))
        scheduler.replay(other, 1)
    assert [graph.limits.input_bytes > 64 * 64 * 8 for graph in made] == [True, True, False, False]


@pytest.mark.parametrize(
    ("lengths", "bucket"),
    [([4, 4, 4], (2, 4)), ([4, 4], (1, 4)), ([4, 5], (2, 8))],
    ids=["the shard with most rows", "rows that are shorter than the batch is wide", "the longest row"],
)
def test_the_bucket_is_the_smallest_for_all_shards(made: list[Graph], lengths: list[int], bucket: tuple[int, int]) -> None:
    with Scheduler([Group()]) as scheduler:  # type: ignore[list-item]
        scheduler.add(step, buckets=[Bucket(2, 8), Bucket(2, 4), Bucket(1, 4)])
        scheduler.compile()
        scheduler.replay(step, Batch({"x": np.ones((len(lengths), 8), np.int64), "lengths": np.array(lengths)}))
    assert [graph.taken[0].value["x"].shape for graph in made] == [bucket] * 2  # type: ignore[index]


def test_sending_to_a_dead_worker_fails_the_replay_when_its_result_is_read(scheduler: Scheduler, made: list[Graph]) -> None:
    made[2].submit, made[3].results = Mock(side_effect=RayChannelError("closed")), [1]  # type: ignore[method-assign]
    replay = scheduler.replay(other, 1)
    with pytest.raises(PhaseError, match=r"RayChannelError.*closed") as caught:
        replay.result()
    assert caught.value.breaks


def test_only_workers_that_a_phase_runs_on_take_a_turn(made: list[Graph]) -> None:
    """A phase on the first of two pipeline stages: later headers have a ticket per worker."""

    @phase
    def first_stage(train: Shard, value):
        return train.stages()[0].map("forward", value)

    group = Group()
    group.layout = ParallelLayout(pp=2)
    group.role = Role("train", group.layout, methods_of(Both), frozenset({"shm"}))
    with compiled(group, phases=(first_stage, other)) as scheduler:
        for one in (first_stage, first_stage, other):
            scheduler.replay(one, 0)
    by_phase = {graph.phase: tickets_of(graph) for graph in made}
    assert by_phase == {"first_stage": [0, (1, 0)], "other": [(2, 0)]}


SHARDS, IN_FLIGHT = 2, 2
NOW_S = 1e-3
NAMES = ("other", "coded")


class Replays(RuleBasedStateMachine):
    """Each replay ends once, with its own results or an error; tickets are taken once and in the same order by all shards.

    A replay is asked for without waiting, so that one that is not answered is a DeadlineError.
    """

    @initialize()
    def begin(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.made = Executors(self.patch).made
        self.scheduler = compiled(Group(SHARDS), phases=(other, coded), max_in_flight=IN_FLIGHT, teardown_s=1.0)
        self.waiting: dict[str, list[tuple[Replay, int]]] = {name: [] for name in NAMES}
        self.answered = dict.fromkeys(NAMES, 0)  # of those that wait, the oldest
        self.number = 0
        self.broken = False

    def graphs(self, name: str) -> list[Graph]:
        """The newest graphs of a phase: those that are not torn down."""
        return [graph for graph in self.made if graph.phase == name and not graph.gone.is_set()]

    @rule(item=st.sampled_from([other, coded]))
    def replay(self, item: Any) -> None:
        if len(self.waiting[item.name]) == IN_FLIGHT:
            return  # it would wait for the oldest
        self.number += 1
        try:
            replay = self.scheduler.replay(item, self.number)
        except PhaseError as error:
            assert self.broken and "recover" in str(error)
            return
        assert not self.broken
        self.waiting[item.name].append((replay, self.number))

    @rule(name=st.sampled_from(NAMES))
    def answer(self, name: str) -> None:
        """The workers finish the oldest replay that they have not finished."""
        if self.broken or self.answered[name] == len(self.waiting[name]):
            return
        _, number = self.waiting[name][self.answered[name]]
        for shard, graph in enumerate(self.graphs(name)):
            graph.results.append((number, shard))
        self.answered[name] += 1

    @rule(name=st.sampled_from(NAMES), place=st.integers(0, IN_FLIGHT - 1))
    def ask(self, name: str, place: int) -> None:
        """For any replay of the phase, not only for the oldest."""
        if self.broken or place >= len(self.waiting[name]):
            return
        replay, number = self.waiting[name][place]
        try:
            found = replay.result(timeout_s=NOW_S)
        except DeadlineError:
            assert place >= self.answered[name]
            read = self.answered[name]
        else:
            assert found == tuple((number, shard) for shard in range(SHARDS)) and place < self.answered[name]
            read = place + 1
        for earlier, expected in self.waiting[name][:read]:
            assert earlier.result() == tuple((expected, shard) for shard in range(SHARDS))
        del self.waiting[name][:read]
        self.answered[name] -= read

    @precondition(lambda self: any(self.waiting.values()) and not self.broken)
    @rule(data=st.data())
    def break_a_graph(self, data: st.DataObject) -> None:
        """A worker dies while it runs the oldest replay of a phase, whose earlier results have been read."""
        name = data.draw(st.sampled_from([name for name, replays in self.waiting.items() if replays]))
        self.ask(name, max(0, self.answered[name] - 1))
        if not self.waiting[name] or self.answered[name]:
            return
        for graph in self.graphs(name):
            graph.results.append(RayChannelError("Channel closed."))
        replay, _ = self.waiting[name][0]
        try:
            replay.result()
        except PhaseError as error:
            assert error.breaks
        else:
            raise AssertionError("a replay on a broken graph succeeded")
        self.broken = True

    @rule()
    def recover(self) -> None:
        self.scheduler.recover()
        for name, replays in self.waiting.items():
            for place, (replay, number) in enumerate(replays):
                self.check_ended(replay, number, place < self.answered[name])
        self.waiting, self.answered = {name: [] for name in NAMES}, dict.fromkeys(NAMES, 0)
        self.broken = False

    def check_ended(self, replay: Replay, number: int, answered: bool) -> None:
        """After a recovery nothing waits: a replay has its own results, if there were any, or an error."""
        try:
            assert replay.result(timeout_s=NOW_S) == tuple((number, shard) for shard in range(SHARDS)) and answered
        except PhaseError:
            return

    @invariant()
    def tickets_are_taken_once_and_in_one_order(self) -> None:
        for shard in range(SHARDS):
            graphs = [graph for name in NAMES for graph in self.graphs(name)[shard : shard + 1]]
            tickets = [packet.header.tickets["train"] for graph in graphs for packet in graph.taken]
            assert len(set(tickets)) == len(tickets)
        for name in NAMES:
            taken = [[packet.header.tickets["train"] for packet in graph.taken] for graph in self.graphs(name)]
            assert taken == [sorted(tickets) for tickets in taken] and all(tickets == taken[0] for tickets in taken)

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.close()
            self.patch.undo()


Replays.TestCase.settings = settings(deadline=None, max_examples=20, stateful_step_count=25)
TestReplays = Replays.TestCase
