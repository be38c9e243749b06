"""Random histories of replays over graphs that run nowhere: results, failures and recoveries in any order."""

from typing import Any
from unittest import mock

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ray.exceptions import RayChannelError

from dagrl.errors import DeadlineError, PhaseError
from dagrl.runtime.executors.base import Actors, GraphLimits, Nodes
from dagrl.runtime.graph import PhaseGraph
from dagrl.runtime.phase import Shard, phase
from dagrl.runtime.replay import Replay
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from tests.unit.runtime.test_schedule import Graph, Group

SHARDS, IN_FLIGHT = 2, 2
NOW_S = 1e-3


@phase
def one(train: Shard, value):
    return train.map("forward", value)


@phase
def two(train: Shard, value):
    return train.map("forward", value)


class Executor:
    def __init__(self) -> None:
        self.made: list[Graph] = []

    def __call__(self, graph: PhaseGraph, actors: Actors, nodes: Nodes, limits: GraphLimits) -> Graph:
        return Graph(graph, limits, self.made)


class Replays(RuleBasedStateMachine):
    """Each replay ends once, with its own results or an error; tickets are taken once and in the same order by all shards.

    A replay is asked for without waiting, so that one that is not answered is a DeadlineError.
    """

    @initialize()
    def begin(self) -> None:
        self.executor = Executor()
        with mock.patch("dagrl.runtime.schedule.executor_of", lambda name, engine: self.executor):
            options = SchedulerOptions(max_in_flight=IN_FLIGHT, replay_s=60.0, teardown_s=1.0)
            self.scheduler = Scheduler([Group(SHARDS)], options)  # type: ignore[list-item]
            for item in (one, two):
                self.scheduler.add(item, warmup_value=0)
            self.scheduler.compile()
        self.waiting: dict[str, list[tuple[Replay, int]]] = {"one": [], "two": []}
        self.answered: dict[str, int] = {"one": 0, "two": 0}  # of those that wait, the oldest
        self.number = 0
        self.broken = False

    def graphs(self, name: str) -> list[Graph]:
        """The newest graphs of a phase: those that are not torn down."""
        return [graph for graph in self.executor.made if graph.phase == name and not graph.gone.is_set()]

    @rule(item=st.sampled_from([one, two]))
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

    @rule(name=st.sampled_from(["one", "two"]))
    def answer(self, name: str) -> None:
        """The workers finish the oldest replay that they have not finished."""
        if self.broken or self.answered[name] == len(self.waiting[name]):
            return
        _, number = self.waiting[name][self.answered[name]]
        for shard, graph in enumerate(self.graphs(name)):
            graph.results.append((number, shard))
        self.answered[name] += 1

    @rule(name=st.sampled_from(["one", "two"]), place=st.integers(0, IN_FLIGHT - 1))
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
        with mock.patch("dagrl.runtime.schedule.executor_of", lambda name, engine: self.executor):
            self.scheduler.recover()
        for name, replays in self.waiting.items():
            for place, (replay, number) in enumerate(replays):
                self.check_ended(replay, number, place < self.answered[name])
        self.waiting, self.answered = {"one": [], "two": []}, {"one": 0, "two": 0}
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
            graphs = [graph for name in ("one", "two") for graph in self.graphs(name)[shard : shard + 1]]
            tickets = [packet.header.tickets["train"] for graph in graphs for packet in graph.taken]
            assert len(set(tickets)) == len(tickets)
        for name in ("one", "two"):
            taken = [[packet.header.tickets["train"] for packet in graph.taken] for graph in self.graphs(name)]
            assert taken == [sorted(tickets) for tickets in taken] and all(tickets == taken[0] for tickets in taken)

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.close()


Replays.TestCase.settings = settings(deadline=None, max_examples=20, stateful_step_count=25)
TestReplays = Replays.TestCase
