"""The scheduler over graphs that run nowhere: what it refuses, what it says after a failure, what it leaves consistent."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dagrl.deadline import Deadline
from dagrl.errors import DataError, DeadlineError, GraphError, LayoutError, PhaseError, RunError
from dagrl.executors.base import Actors, Limits
from dagrl.executors.packet import Packet
from dagrl.graph import PhaseGraph
from dagrl.layout import ParallelLayout
from dagrl.phase import Phase, Role, Shard, methods_of, phase
from dagrl.scheduler import SETTLING_REPLAYS, Scheduler, SchedulerOptions
from dagrl.shapes import Batch, Bucket, Field
from dagrl.worker_group import WorkerGroup
from tests.unit.phase_worker import Both

BATCH = {"x": Field("int64"), "lengths": Field("int64", "row")}


@phase(inputs=BATCH)
def step(train: Shard, batch):
    return train.map("forward", batch)


@phase
def other(train: Shard, value):
    return train.map("forward", value)


class Graph:
    """A graph whose replays give what the test says; `taken` are the packets that were sent."""

    def __init__(self, graph: PhaseGraph, limits: Limits, made: list[Graph]) -> None:
        self.phase, self.outputs, self.limits = graph.phase, len(graph.outputs), limits
        self.taken: list[Packet] = []
        self.results: list[Any] = []
        self.gone = threading.Event()
        self.meet: threading.Barrier | None = None
        made.append(self)

    def submit(self, packet: Packet) -> Packet:
        if self.results and isinstance(self.results[0], TypeError):
            raise self.results.pop(0)
        self.taken.append(packet)
        return packet

    def fetch(self, submitted: Packet, timeout_s: float) -> list[Packet]:
        if not self.results:
            self.gone.wait(timeout_s)
            raise TimeoutError
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return [Packet(submitted.header, result)] * self.outputs

    def failures(self, submitted: Packet) -> list[Any]:
        return []

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
        self.actors = [SimpleNamespace(_actor_id=f"{name}{rank}") for rank in range(dp)]
        self.places = [SimpleNamespace(node=f"host{rank}") for rank in range(dp)]  # a graph each
        self.gates: list[list[int]] = []

    def reset_tickets(self, tickets: Sequence[int], deadline: Deadline) -> None:
        self.gates.append(list(tickets))

    def pass_tickets(self, tickets: Sequence[int]) -> None:
        pass

    def reports(self, timeout_s: float) -> dict[int, Any]:
        return {}

    def abort(self, ranks: Sequence[int]) -> None:
        pass

    def kill(self, ranks: Sequence[int]) -> None:
        pass


class FailingExecutor:
    """Cannot make its second graph."""

    name = "failing"

    def __init__(self, graphs: list[Graph]) -> None:
        self.graphs = graphs

    def compile(self, graph: PhaseGraph, actors: Actors, limits: Limits) -> Graph:
        if self.graphs:
            raise TimeoutError("no free thread")
        return Graph(graph, limits, self.graphs)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that were compiled, in order."""
    graphs: list[Graph] = []

    class Executor:
        name = "fake"

        def compile(self, graph: PhaseGraph, actors: Actors, limits: Limits) -> Graph:
            return Graph(graph, limits, graphs)

    monkeypatch.setattr("dagrl.scheduler.executor_of", lambda name: Executor())
    return graphs


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def scheduler(group: Group, made: list[Graph]) -> Iterator[Scheduler]:
    scheduler = Scheduler([group])  # type: ignore[list-item]
    scheduler.add(step, buckets=[Bucket(4, 4)])
    scheduler.add(other, warmup_value=0)
    scheduler.compile()
    yield scheduler
    scheduler.close()


def batch(rows: int) -> Batch:
    return Batch({"x": np.arange(4 * rows).reshape(rows, 4), "lengths": np.full(rows, 4)})


def tickets_of(graph: Graph) -> list[Any]:
    return [packet.header.tickets["train"] for packet in graph.taken]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[0, 1, 2]], "2 shards, but `rows` deals to 1"),
        ([[0], [1], [2]], "2 shards, but `rows` deals to 3"),
        ([[0, 1], [1]], "positions 0 to 2 .* once"),
        ([[0, 1], [3]], "positions 0 to 2 .* once"),
        ([[0], [1]], "positions 0 to 2 .* once"),
    ],
)
def test_rows_that_are_no_deal_are_refused_before_any_ticket_is_taken(
    scheduler: Scheduler, made: list[Graph], rows: list[list[int]], words: str
) -> None:
    with pytest.raises(RunError, match=words):
        scheduler.replay(step, batch(3), rows=[np.array(mine, np.intp) for mine in rows])
    scheduler.replay(step, batch(3), rows=[np.array([0, 2]), np.array([1])])
    assert [tickets_of(graph) for graph in made[:2]] == [[0], [0]]


X, LENGTHS = np.zeros((2, 4), np.int64), np.full(2, 4)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, r"'step' takes a batch of lengths int64 \[rows\], x int64 \[rows, tokens\]; it was given a NoneType"),
        ({"x": X, "lengths": LENGTHS}, "it was given a dict"),
        (Batch({"lengths": LENGTHS}), r"a batch without x int64 \[rows, tokens\] and with any other\. Convert these"),
        (Batch({"x": X, "lengths": LENGTHS, "y": X}), r"without any other and with y int64 \[rows, tokens\]"),
        (Batch({"x": X.astype("float32"), "lengths": LENGTHS}), r"without x int64 .* and with x float32 \[rows, tokens\]"),
        (Batch({"x": X, "lengths": LENGTHS.astype("int32")}), r"without lengths int64 \[rows\] and with lengths int32"),
        (Batch({"x": X[:, 0], "lengths": LENGTHS}), r"without x int64 \[rows, tokens\] and with x int64 \[rows\]"),
        (Batch({"x": X[:, :3], "lengths": LENGTHS}), r"`lengths` from 4 to 4, in fields of .* tokens: \{'x': 3\}; "),
        (Batch({"x": X, "lengths": LENGTHS - [0, 5]}), "`lengths` from -1 to 4"),
    ],
)
def test_an_input_that_is_no_batch_of_the_phases_fields_is_refused_before_anything_is_sent(
    scheduler: Scheduler, made: list[Graph], value: object, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        scheduler.replay(step, value)
    scheduler.replay(step, batch(2))
    assert [tickets_of(graph) for graph in made[:2]] == [[0], [0]]


def test_a_batch_without_rows_or_of_another_order_of_fields_is_one(scheduler: Scheduler) -> None:
    scheduler.replay(step, Batch({"lengths": LENGTHS[:0], "x": X[:0]}))


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([X.repeat(2, 0), np.ones((4, 5))], r"'y' has the shape \[4, 5\], .* bucket 4 x 4\. Return \[4\] or \[4, 4\]"),
        ([X.repeat(2, 0), X], r"'lengths' has the shape \[2\]"),
        ([X.repeat(2, 0), None], r"one has the fields \['lengths', 'y'\], another one \['lengths'\]"),
    ],
)
def test_results_of_another_shape_than_the_buckets_are_refused(
    scheduler: Scheduler, made: list[Graph], shards: list[np.ndarray | None], words: str
) -> None:
    replay = scheduler.replay(step, batch(2))
    for graph, y in zip(made, shards, strict=False):
        rows = 4 if y is None else len(y)
        graph.results = [Batch({"lengths": np.ones(rows), **({} if y is None else {"y": y})})]
    with pytest.raises(PhaseError, match="replay 0: the results of its shards do not make one: .*" + words):
        replay.result()


def test_a_replay_that_reached_some_workers_alone_breaks_the_graphs(scheduler: Scheduler, made: list[Graph]) -> None:
    made[1].results = [TypeError("cannot be sent")]
    with pytest.raises(TypeError):
        scheduler.replay(step, batch(2))
    with pytest.raises(PhaseError, match=r"replay 0 of phase 'step' could not be sent to all .*recover") as caught:
        scheduler.replay(other, 1)
    assert caught.value.breaks


def test_two_phases_of_one_name_are_refused(scheduler: Scheduler) -> None:
    namesake = Phase("step", other.function, None, other.roles)
    with pytest.raises(GraphError, match="'step' was added already"):
        scheduler.add(namesake, warmup_value=0)
    with pytest.raises(RunError, match="another phase of that name"):
        scheduler.replay(namesake, 1)


def test_an_actor_in_two_groups_is_refused() -> None:
    train, generation = Group(), Group(name="generation")
    generation.actors = train.actors
    with pytest.raises(LayoutError, match="groups 'train' and 'generation'; make one group"):
        Scheduler([train, generation])  # type: ignore[list-item]


def test_a_group_in_place_of_another_has_its_role_and_layout(scheduler: Scheduler, made: list[Graph]) -> None:
    with pytest.raises(LayoutError, match="there is no group 'critic' to replace; there are train"):
        scheduler.replace_group(Group(name="critic"))  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="has the layout dp3, but phases were traced for dp2"):
        scheduler.replace_group(Group(3))  # type: ignore[arg-type]
    foreign = Group()
    foreign.owned = False
    scheduler.replace_group(foreign)  # type: ignore[arg-type]
    made.clear()
    scheduler.recover()
    assert made and not any(graph.limits.may_kill for graph in made), "its workers are somebody else's"


def test_a_replay_that_is_sent_while_graphs_are_torn_down_says_so(scheduler: Scheduler, made: list[Graph]) -> None:
    """Another thread has seen that the phase is compiled, and waits for the lock meanwhile."""
    said: list[BaseException] = []

    def send() -> None:
        try:
            scheduler.replay(step, batch(8))
        except BaseException as error:
            said.append(error)

    with scheduler._lock:
        thread = threading.Thread(target=send)
        thread.start()
        time.sleep(0.1)
        scheduler._teardown()
    thread.join(30.0)
    assert [type(error) for error in said] == [RunError] and "is not compiled" in str(said[0])


def test_an_interrupt_while_tickets_are_taken_breaks_the_graphs(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers would wait for turns that nobody has."""
    take, taken = scheduler._take_tickets, []

    def interrupted(seats: Any) -> Any:
        taken.append(take(seats))
        if len(taken) == 2:
            raise KeyboardInterrupt
        return taken[-1]

    monkeypatch.setattr(scheduler, "_take_tickets", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scheduler.replay(step, batch(8))
    with pytest.raises(PhaseError, match=r"could not be sent to all its workers.*call scheduler.recover\(\)"):
        scheduler.replay(step, batch(8))


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, math.inf, math.nan])
def test_a_deadline_is_a_number_of_seconds(scheduler: Scheduler, deadline_s: float) -> None:
    with pytest.raises(RunError, match=r"deadline_s is .*; expected seconds"):
        scheduler.replay(step, batch(8), deadline_s=deadline_s)


def test_an_await_that_is_cancelled_leaves_no_thread_for_long(scheduler: Scheduler) -> None:
    """`asyncio.run` waits for its threads at its end."""

    async def ask() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scheduler.replay(step, batch(8)), 0.2)

    start = time.monotonic()
    asyncio.run(ask())
    assert time.monotonic() - start < 30, "the replay's own deadline is two minutes"


def test_two_groups_of_one_role_are_refused() -> None:
    groups: list[Any] = [Group(), Group(name="generation"), Group()]
    with pytest.raises(LayoutError, match=r"2 groups have the role 'train'.*from_actors\(\.\.\., role=\.\.\.\)"):
        Scheduler(groups)


def test_an_actor_that_is_two_ranks_is_refused() -> None:
    actors: list[Any] = [SimpleNamespace(_actor_id=name) for name in "abca"]
    with pytest.raises(LayoutError, match="ranks 0 and 3 of the role 'train' are one actor"):
        WorkerGroup.from_actors(actors, ParallelLayout(dp=4))


@pytest.mark.parametrize(
    ("first_s", "others_s", "replays"),
    [(0.9, 0.001, SETTLING_REPLAYS), (0.06, 0.06, 2), (0.01, 0.03, 4), (1.1, 0.001, 1)],
    ids=["cold", "slow", "quick", "very slow"],
)
def test_a_warm_up_is_repeated_by_what_its_second_replay_took(
    made: list[Graph], monkeypatch: pytest.MonkeyPatch, first_s: float, others_s: float, replays: int
) -> None:
    now = 0.0
    monkeypatch.setattr("dagrl.scheduler.time", SimpleNamespace(perf_counter=lambda: now, monotonic=time.monotonic))
    with Scheduler([Group(dp=1)]) as scheduler:  # type: ignore[list-item]
        scheduler.add(other, warmup_value=0)
        scheduler.compile()
        (graph,) = made

        def fetch(submitted: Packet, timeout_s: float) -> list[Packet]:
            nonlocal now
            now += others_s if len(graph.taken) > 1 else first_s
            return [Packet(submitted.header, None)]

        graph.fetch = fetch  # type: ignore[method-assign]
        scheduler.warmup()
    assert len(graph.taken) == replays


def test_lengths_may_be_of_any_whole_numbers(made: list[Graph]) -> None:
    short = Phase("short", step.function, BATCH | {"lengths": Field("int32", "row")}, step.roles)
    with Scheduler([Group()]) as scheduler:  # type: ignore[list-item]
        scheduler.add(short, buckets=[Bucket(4, 4)])
        scheduler.compile()
        for graph in made:
            graph.results = [None] * SETTLING_REPLAYS
        scheduler.warmup()
    assert {packet.value["lengths"].dtype for packet in made[0].taken} == {np.dtype("int32")}  # type: ignore[index]


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        (Field("int64"), r"`lengths` of its inputs are int64 \[rows, tokens\]"),
        (Field("float32", "row"), r"float32 \[rows\]; "),
    ],
)
def test_lengths_that_are_no_whole_number_a_row_are_refused(lengths: Field, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        phase(inputs={"lengths": lengths})(step.function)


def test_a_result_can_be_asked_for_with_a_deadline_and_asked_again(scheduler: Scheduler, made: list[Graph]) -> None:
    replay = scheduler.replay(step, batch(2))
    made[0].results = [1]
    with pytest.raises(DeadlineError, match="no result yet"):
        replay.result(timeout_s=0.05)
    made[1].results = [2]
    assert replay.result(timeout_s=60.0) == (1, 2)
    assert replay.result() == (1, 2)


def test_whether_a_result_is_there_is_told_without_waiting_or_raising(scheduler: Scheduler, made: list[Graph]) -> None:
    replay, failing = scheduler.replay(step, batch(2)), scheduler.replay(other, 1)
    assert not replay.ready() and not failing.ready()
    for graph in made[:2]:
        graph.results = [1]
    made[2].results, made[3].results = [ValueError("broken")], [1]
    assert replay.ready() and replay.result() == (1, 1)
    assert failing.ready()
    with pytest.raises(PhaseError, match="broken"):
        failing.result()


def test_a_deadline_holds_while_another_thread_waits(scheduler: Scheduler, made: list[Graph]) -> None:
    replay = scheduler.replay(other, 1)
    thread = threading.Thread(target=replay.result)
    thread.start()
    time.sleep(0.1)
    with pytest.raises(DeadlineError):
        replay.result(timeout_s=0.05)
    assert thread.is_alive()
    for graph in made[2:]:
        graph.results = [1]
    thread.join(60.0)
    assert replay.result(timeout_s=0.0) == (1, 1)


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

    def fetch(self, submitted: Packet, timeout_s: float) -> list[Packet]:
        time.sleep(0.001)
        with self.counting:
            self.now -= 1
        return [Packet(submitted.header, submitted.value)]


def test_threads_that_submit_one_phase_keep_to_the_replays_in_flight(scheduler: Scheduler, made: list[Graph]) -> None:
    """Five look for room while the first is being sent, and is not in flight yet."""
    counted = Counted(made[2])
    made[3].fetch = lambda submitted, timeout_s: [Packet(submitted.header, 0)]  # type: ignore[method-assign]
    replays = []
    threads = [threading.Thread(target=lambda: replays.append(scheduler.replay(other, 1))) for _ in range(6)]
    threads[0].start()
    assert counted.sending.wait(60.0)
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.1)
    counted.go_on.set()
    for thread in threads:
        thread.join(60.0)
    assert counted.most == scheduler.options.max_in_flight == 2
    assert len({replay.number for replay in replays}) == 6 and [replay.result() for replay in replays] == [(1, 0)] * 6


def test_a_broken_graph_is_told_at_once_where_there_is_no_room_either(scheduler: Scheduler, made: list[Graph]) -> None:
    for _ in range(2):
        scheduler.replay(other, 1)
    made[1].results = [TypeError("cannot be sent")]
    with pytest.raises(TypeError):
        scheduler.replay(step, batch(2))
    started = time.monotonic()
    with pytest.raises(PhaseError, match="recover"):
        scheduler.replay(other, 1)
    assert time.monotonic() - started < 60.0  # the deadline of those in flight is 120 s


def test_a_warm_up_replays_full_batches_of_every_bucket_the_largest_first(group: Group, made: list[Graph]) -> None:
    """So that the memory that the largest needs is there once, and not behind what smaller ones have left in pieces."""
    scheduler = Scheduler([group], SchedulerOptions(warmup_s=7.0))  # type: ignore[list-item]
    scheduler.add(step, buckets=[Bucket(1, 4), Bucket(4, 8), Bucket(2, 8)], scalars={"lr": 0.5}, token_ids=9)
    scheduler.compile()
    for graph in made:
        graph.fetch = lambda submitted, timeout_s: [Packet(submitted.header, 0)]  # type: ignore[method-assign]
    scheduler.warmup()
    for graph in made:
        assert all(packet.header.warmup and packet.header.deadline_s == 7.0 for packet in graph.taken)
        sent = list(dict.fromkeys((packet.value.rows, *packet.value["lengths"].tolist()) for packet in graph.taken))
        assert sent == [(4, *[8] * 4), (2, *[8] * 2), (1, 4)]
        assert {packet.value.number("lr") for packet in graph.taken} == {0.5}
    scheduler.close()


def test_the_deadline_of_a_replay_reaches_its_workers(scheduler: Scheduler, made: list[Graph]) -> None:
    scheduler.replay(other, 1, deadline_s=600.0)
    scheduler.replay(other, 1)
    assert [packet.header.deadline_s for packet in made[2].taken] == [600.0, scheduler.options.replay_s]


def test_an_error_of_any_kind_is_the_replays_own(scheduler: Scheduler, made: list[Graph]) -> None:
    first, second = scheduler.replay(step, batch(2)), scheduler.replay(other, 1)
    made[0].results, made[1].results = [KeyError("a worker's loop")], [1]
    for graph in made[2:]:
        graph.results = ["unharmed"]
    for _ in range(2):
        with pytest.raises(PhaseError, match="replay 0: its graph broke, though no worker died: KeyError"):
            first.result()
    assert second.result() == ("unharmed", "unharmed")
    with pytest.raises(PhaseError, match="recover"):
        scheduler.replay(other, 1)


def test_results_that_make_no_batch_fail_the_replay_but_not_its_graph(scheduler: Scheduler, made: list[Graph]) -> None:
    replay = scheduler.replay(step, batch(2))
    made[0].results, made[1].results = [batch(1)], [Batch({"lengths": np.ones(1)})]
    for _ in range(2):
        with pytest.raises(PhaseError, match="replay 0: the results of its shards do not make one"):
            replay.result()
    again = scheduler.replay(step, batch(2))
    made[0].results, made[1].results = [1], [2]
    assert again.result() == (1, 2)


@pytest.mark.parametrize("end", ["recover", "close"])
def test_a_replay_under_way_when_its_graphs_end_says_so(scheduler: Scheduler, end: str) -> None:
    replay = scheduler.replay(step, batch(2))
    getattr(scheduler, end)()
    with pytest.raises(PhaseError, match="'step', replay 0 was under way when its graphs were torn down"):
        replay.result()


def test_turns_begin_where_the_schedulers_replays_do(scheduler: Scheduler, group: Group, made: list[Graph]) -> None:
    scheduler.replay(step, batch(2))
    scheduler.compile()  # nothing new, and turns are being waited for
    assert group.gates == [[0, 0]]
    scheduler.recover()
    second = Scheduler([group])  # type: ignore[list-item]
    second.add(other, warmup_value=0)
    second.compile()
    assert group.gates == [[0, 0], [1, 1], [0, 0]]


def test_graphs_are_torn_down_at_once(scheduler: Scheduler, made: list[Graph]) -> None:
    """Each has the whole deadline, however many there are."""
    meet = threading.Barrier(len(made))
    for graph in made:
        graph.meet = meet
    scheduler.close()
    assert all(graph.gone.is_set() for graph in made) and not meet.broken


def test_a_phase_that_compiles_on_some_shards_alone_leaves_no_graph_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Graph] = []
    monkeypatch.setattr("dagrl.scheduler.executor_of", lambda name: FailingExecutor(graphs))
    scheduler = Scheduler([Group()], SchedulerOptions(fallback="error"))  # type: ignore[list-item]
    scheduler.add(other, warmup_value=0)
    with pytest.raises(RunError, match="'other' could not be compiled: no free thread"):
        scheduler.compile()
    assert [graph.gone.is_set() for graph in graphs] == [True]


def test_what_sets_the_room_for_results_is_named(scheduler: Scheduler, made: list[Graph]) -> None:
    namesake = Phase("own", other.function, None, other.roles)
    scheduler.add(namesake, warmup_value=0, result_bytes=1 << 20)
    scheduler.compile()
    keys = {graph.phase: graph.limits.result_key for graph in made}
    assert (keys["other"], keys["own"]) == ("executor_cfg.result_bytes", "result_bytes of Scheduler.add(own)")


def test_workers_of_somebody_else_are_not_killed_by_a_teardown(made: list[Graph]) -> None:
    group = Group()
    group.owned = False
    scheduler = Scheduler([group])  # type: ignore[list-item]
    scheduler.add(other, warmup_value=0)
    scheduler.compile()
    assert not any(graph.limits.may_kill for graph in made)
