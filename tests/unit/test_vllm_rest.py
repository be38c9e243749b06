"""An engine that vLLM schedules asynchronously (which it does on GPUs alone): a step in flight, and none when it matters."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dagrl.config import GenerationConfig
from dagrl.errors import DataError, RunError
from dagrl.generation import Generated, Progress, checksum
from workers.vllm.engine import QuantumEngine, Request


class AsynchronousEngine:
    """A vLLM engine whose steps give out what the step before them made; each request ends after its number of tokens."""

    model_config = SimpleNamespace(max_model_len=100, get_vocab_size=lambda: 10)

    def __init__(self) -> None:
        self.engine_core = SimpleNamespace(engine_core=self)
        self.batch_queue: deque[list[str]] = deque()
        self.left: dict[str, int] = {}
        self.made: dict[str, int] = {}
        self.paused = False
        self.aborted: list[str] = []
        self.salts: dict[str, str] = {}  # of the cache keys of requests
        self.caches_dropped: list[bool] = []  # whether with those of running requests
        self.broken = False
        self.output_processor = SimpleNamespace(request_states={})
        self.seconds = iter(())  # that the steps take; then none
        self.now = 0.0

    def add_request(self, name: str, prompt: dict[str, Any], length: int) -> None:
        assert name not in self.left
        self.left[name], self.made[name], self.salts[name] = length, 0, prompt["cache_salt"]

    def has_unfinished_requests(self) -> bool:
        return bool(self.left) or bool(self.batch_queue)

    def pause_scheduler(self, mode: str, *, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False), "running requests keep their KV cache"
        self.paused = True

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        assert not self.batch_queue
        self.caches_dropped.append(reset_running_requests)
        return True

    def sleep(self, level: int) -> None:
        assert not self.batch_queue

    def abort_request(self, names: list[str]) -> None:
        assert not self.batch_queue
        self.aborted += names
        for name in names:
            del self.left[name]

    def resume_scheduler(self) -> None:
        self.paused = False

    def step(self) -> list[Any]:
        if self.broken:
            raise OSError("a step broke")
        self.now += next(self.seconds, 0.0)
        self.batch_queue.appendleft([] if self.paused else list(self.left))
        for name in self.batch_queue[0]:
            self.made[name] += 1
        ended = [name for name in self.batch_queue[0] if self.made[name] == self.left[name]]
        self.batch_queue[0][:] = ended
        for name in ended:
            del self.left[name]
        if len(self.batch_queue) < 2:
            return []
        given = self.batch_queue.pop()
        while self.paused and self.batch_queue and not self.batch_queue[-1]:
            self.batch_queue.pop()
        return [self._output(name) for name in given]

    def _output(self, name: str) -> Any:
        tokens = list(range(self.made[name]))
        logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in tokens]
        completion = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason="length")
        return SimpleNamespace(finished=True, request_id=name, outputs=[completion])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> QuantumEngine:
    monkeypatch.setattr(QuantumEngine, "_sampling", lambda self, request: request.max_new_tokens)
    return QuantumEngine(cast("Any", AsynchronousEngine()), GenerationConfig(), ())


@pytest.fixture
def vllm(engine: QuantumEngine, monkeypatch: pytest.MonkeyPatch) -> AsynchronousEngine:
    """The engine's own, whose steps alone move the clock."""
    vllm = cast("AsynchronousEngine", engine._engine)
    monkeypatch.setattr("workers.vllm.engine.time", SimpleNamespace(perf_counter=lambda: vllm.now))
    return vllm


def asked(**lengths: int) -> list[Request]:
    return [Request(int(name[1:]), [1], seed=0, max_new_tokens=length, greedy=True) for name, length in lengths.items()]


def rows(made: Generated) -> list[tuple[int, int]]:
    """Which requests finished, and with how many tokens."""
    return [(row.request_id, len(row.tokens)) for row in map(made.request, range(len(made)))]


def test_a_step_stays_in_flight_from_quantum_to_quantum(engine: QuantumEngine) -> None:
    vllm = cast("AsynchronousEngine", engine._engine)
    made = engine.run(asked(r1=3, r2=5, r3=9), 5)
    assert (made.engine_steps, rows(made), len(vllm.batch_queue)) == (5, [(1, 3)], 1), "the fifth step gives out later"
    assert rows(engine.run([], 1)) == [(2, 5)]
    assert rows(engine.run([], 100)) == [(3, 9)]
    assert not vllm.batch_queue, "nor is one in flight that was started before the end of all requests was known"


def test_a_quantum_of_no_steps_brings_the_engine_to_rest(engine: QuantumEngine) -> None:
    vllm = cast("AsynchronousEngine", engine._engine)
    engine.run(asked(r2=5, r3=9), 5)
    made = engine.run([], 0)
    assert (made.engine_steps, rows(made), vllm.made["3"]) == (0, [(2, 5)], 5)
    assert (len(vllm.batch_queue), vllm.paused) == (0, False)


def test_a_quantum_ends_with_the_step_in_which_its_time_has_passed(engine: QuantumEngine, vllm: AsynchronousEngine) -> None:
    vllm.seconds = iter([0.25, 0.25, 1.0, 9.0, 0.25])
    assert engine.run(asked(r1=100), 8, 1.0).engine_steps == 3, "1.5 s"
    assert engine.run([], 8, 1.0).engine_steps == 1, "there is always one"
    made = engine.run([], 2, 1.0)
    assert (made.engine_steps, made.unfinished) == (2, 1), "and no more than were asked for"
    vllm.seconds = iter([9.0] * 5)
    assert engine.run([], 5).engine_steps == 5, "no time is stated"


def test_ranks_that_run_in_step_make_all_steps_whatever_their_clocks_say(
    engine: QuantumEngine, vllm: AsynchronousEngine
) -> None:
    compared: list[int] = []
    engine._peers = cast("Any", SimpleNamespace(compare=lambda step, ended: compared.append(step)))
    vllm.seconds = iter([9.0] * 4)
    assert engine.run(asked(r1=100), 4, 1.0).engine_steps == 4
    assert compared == [4]
    engine.run(asked(r2=2), 5)
    assert compared == [4, 3, 5], "and whenever a request ends"


def test_what_finishes_before_a_change_comes_with_the_next_quantum(engine: QuantumEngine) -> None:
    engine.run(asked(r1=2, r2=5, r3=9), 5)
    engine.rest()
    assert rows(engine.run([], 1)) == [(2, 5)]


def test_a_rehearsal_gives_out_its_own_requests_and_keeps_those_of_others(engine: QuantumEngine) -> None:
    """Also of the request that is number 0, and what finishes in its last step, which gives out when the engine rests."""
    vllm = cast("AsynchronousEngine", engine._engine)
    engine.run(asked(r0=3, r1=6, r2=50), 2)
    ours = [Request(-1 - row, [1], seed=0, max_new_tokens=length, greedy=True) for row, length in enumerate((2, 4, 50))]
    made = engine.rehearse(ours, 4)
    assert (sorted(rows(made)), made.engine_steps, made.unfinished) == ([(-2, 4), (-1, 2)], 4, 1)
    assert (vllm.aborted, vllm.caches_dropped, len(vllm.batch_queue)) == (["-3"], [False], 0)
    assert (sorted(rows(engine.run([], 1))), engine.unfinished) == ([(0, 3), (1, 6)], 1)
    assert rows(engine.run([], 100)) == [(2, 50)]


def test_an_engine_does_not_sleep_while_requests_run(engine: QuantumEngine) -> None:
    engine.run(asked(r1=3, r2=5), 3)
    with pytest.raises(RunError, match="1 requests are running; let them finish or abort them"):
        engine.sleep(1)
    engine.abort()
    engine.sleep(1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"request_id": 1}, "request 1 is already running"),
        ({"request_id": 2}, "request 2 is already running"),
        ({"prompt": []}, "has 0 tokens; vLLM takes 1 to 99 here"),
        ({"prompt": [1] * 100}, "has 100 tokens; vLLM takes 1 to 99 here"),
        ({"prompt": [-1, 9]}, "tokens from -1 to 9; the model has 0 to 9"),
        ({"prompt": [0, 10]}, "tokens from 0 to 10; the model has 0 to 9"),
        ({"max_new_tokens": 0}, "asks for 0 new tokens"),
        ({"seed": -1}, "with seed -1"),
    ],
)
def test_unusable_requests_are_refused_before_any_is_added(
    engine: QuantumEngine, wrong: dict[str, Any], message: str
) -> None:
    good = Request(1, [0, 9], seed=0, max_new_tokens=3, greedy=True)
    engine.run([good], 1)
    with pytest.raises(DataError, match=message):
        engine.run([replace(good, request_id=2), replace(good, **{"request_id": 3, **wrong})], 1)
    assert (engine.unfinished, engine.interrupted) == (1, False)
    assert rows(engine.run([replace(good, request_id=2), replace(good, request_id=3, prompt=[1] * 99)], 9))


def test_an_aborted_request_is_not_given_out_though_it_finished(engine: QuantumEngine) -> None:
    vllm = cast("AsynchronousEngine", engine._engine)
    engine.run(asked(r2=5, r3=9), 5)
    assert engine.abort([2, 3]) == 2
    assert vllm.aborted == ["3"], "vLLM knows no more of what has finished"
    assert rows(engine.run([], 0)) == []


def states_of(vllm: AsynchronousEngine) -> dict[str, Any]:
    """What vLLM knows of the requests that run, by names of its own."""
    return {f"{name}-0": state_of(name, list(range(vllm.made[name]))) for name in vllm.left}


def state_of(name: str, tokens: list[int]) -> Any:
    logprobs = [{token: SimpleNamespace(logprob=-float(token)), 9: SimpleNamespace(logprob=-9.0)} for token in tokens]
    return SimpleNamespace(
        external_req_id=name,
        detokenizer=SimpleNamespace(output_token_ids=tokens, num_output_tokens=lambda: len(tokens)),
        logprobs_processor=SimpleNamespace(logprobs=logprobs),
    )


def test_tokens_have_the_version_of_the_weights_that_made_them(engine: QuantumEngine) -> None:
    vllm = cast("AsynchronousEngine", engine._engine)
    engine.run(asked(r1=6), 4)
    engine.rest()
    vllm.output_processor.request_states = states_of(vllm)
    engine.change_version(7)
    vllm.output_processor.request_states = {}
    assert engine.run([], 100).versions.tolist() == [[0, 0, 0, 0, 7, 7]]


@pytest.mark.parametrize("recompute", [False, True])
def test_requests_without_a_token_begin_anew_with_a_new_version(engine: QuantumEngine, recompute: bool) -> None:
    """Only they: prefixes that older weights made would be found under their cache key."""
    vllm = cast("AsynchronousEngine", engine._engine)
    engine.run(asked(r1=6, r2=3), 2)
    engine.rest()
    vllm.made["2"] = 0  # it waited for a slot
    vllm.output_processor.request_states = states_of(vllm)
    engine.change_version(7, recompute=recompute)
    assert (vllm.aborted, vllm.salts) == (["2"], {"1": "version 0", "2": "version 7"})
    assert vllm.caches_dropped == [recompute]
    vllm.output_processor.request_states = {}
    made = engine.run([], 100)
    versions = {row.request_id: row.versions for row in map(made.request, range(len(made)))}
    assert versions == {1: [0, 0, 7, 7, 7, 7], 2: [7, 7, 7]}


def test_a_snapshot_is_of_an_engine_at_rest(engine: QuantumEngine) -> None:
    vllm = cast("AsynchronousEngine", engine._engine)
    engine.run(asked(r2=5, r3=9, r4=9), 5)
    vllm.output_processor.request_states = {"3-0": state_of("3", [5, 6, 7])}
    found = {row.request_id: row for row in engine.snapshot()}
    assert found.keys() == {3, 4}, "the other has finished"
    assert (found[3].tokens, found[3].logprobs, found[3].versions) == ([5, 6, 7], [-5.0, -6.0, -7.0], [0, 0, 0])
    assert {row.finish_reason for row in found.values()} == {"unfinished"}
    assert (found[4].tokens, found[4].logprobs) == ([], [])
    vllm.output_processor.request_states = {}
    assert rows(engine.run([], 1)) == [(2, 5)]


def test_progress_is_that_of_all_tokens_so_far(engine: QuantumEngine) -> None:
    vllm = cast("AsynchronousEngine", engine._engine)
    for count in (0, 2, 2, 5):
        vllm.output_processor.request_states = {"1-0": state_of("1", [7, 8, 9, 3, 4][:count])}
        engine.run(asked(r1=50) if not engine.unfinished else [], 1)
        assert engine._progress() == [Progress(1, count, checksum([7, 8, 9, 3, 4][:count]))]


@pytest.mark.parametrize("at_rest", [False, True], ids=["in a quantum", "coming to rest"])
def test_an_engine_that_broke_in_a_step_is_lost(engine: QuantumEngine, at_rest: bool) -> None:
    vllm = cast("AsynchronousEngine", engine._engine)
    engine.run(asked(r1=9), 2)
    assert not engine.interrupted
    vllm.broken = True
    with pytest.raises(OSError, match="a step broke"):
        engine.rest() if at_rest else engine.run([], 1)
    assert engine.interrupted
    vllm.broken = False
    with pytest.raises(RunError, match="an earlier quantum broke off"):
        engine.run([], 1)


def test_a_quantum_that_was_given_up_ends_with_its_step(engine: QuantumEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever that returns: collectives that were aborted under it end without an error."""
    step = AsynchronousEngine.step

    def given_up(vllm: AsynchronousEngine) -> list[Any]:
        engine.give_up()  # from another thread
        return step(vllm)

    monkeypatch.setattr(AsynchronousEngine, "step", given_up)
    with pytest.raises(RunError, match="aborted inside an engine step"):
        engine.run(asked(r1=9), 5)
    assert engine.interrupted
