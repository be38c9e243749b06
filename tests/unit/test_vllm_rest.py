"""An engine that vLLM schedules asynchronously (which it does on GPUs alone): a step in flight, and none when it matters."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dagrl.config import GenerationConfig
from dagrl.generation import Generated
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
        self.output_processor = SimpleNamespace(request_states={})
        self.seconds = iter(())  # that the steps take; then none
        self.now = 0.0

    def add_request(self, name: str, prompt: object, length: int) -> None:
        self.left[name], self.made[name] = length, 0

    def has_unfinished_requests(self) -> bool:
        return bool(self.left) or bool(self.batch_queue)

    def pause_scheduler(self, mode: str, *, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False), "running requests keep their KV cache"
        self.paused = True

    def reset_prefix_cache(self) -> bool:
        assert not self.batch_queue
        return True

    def abort_request(self, names: list[str]) -> None:
        assert not self.batch_queue
        self.aborted += names
        for name in names:
            del self.left[name]

    def resume_scheduler(self) -> None:
        self.paused = False

    def step(self) -> list[Any]:
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


def test_what_finishes_before_a_change_comes_with_the_next_quantum(engine: QuantumEngine) -> None:
    engine.run(asked(r1=2, r2=5, r3=9), 5)
    engine.rest()
    assert rows(engine.run([], 1)) == [(2, 5)]


def test_an_aborted_request_is_not_given_out_though_it_finished(engine: QuantumEngine) -> None:
    vllm = cast("AsynchronousEngine", engine._engine)
    engine.run(asked(r2=5, r3=9), 5)
    assert engine.abort([2, 3]) == 2
    assert vllm.aborted == ["3"], "vLLM knows no more of what has finished"
    assert rows(engine.run([], 0)) == []


def test_tokens_have_the_version_of_the_weights_that_made_them(engine: QuantumEngine) -> None:
    vllm = cast("AsynchronousEngine", engine._engine)
    engine.run(asked(r1=6), 4)
    engine.rest()
    vllm.output_processor.request_states = {
        "1": SimpleNamespace(external_req_id="1", detokenizer=SimpleNamespace(num_output_tokens=lambda: vllm.made["1"]))
    }
    engine.change_version(7)
    vllm.output_processor.request_states = {}
    assert engine.run([], 100).versions.tolist() == [[0, 0, 0, 0, 7, 7]]
