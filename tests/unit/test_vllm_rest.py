"""Between two quanta no engine step is in flight, also where vLLM schedules asynchronously (which it does on GPUs alone)."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dagrl.config import GenerationConfig
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
        self.output_processor = SimpleNamespace(request_states={})

    def add_request(self, name: str, prompt: object, length: int) -> None:
        self.left[name], self.made[name] = length, 0

    def has_unfinished_requests(self) -> bool:
        return bool(self.left) or bool(self.batch_queue)

    def pause_scheduler(self, mode: str, *, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False), "running requests keep their KV cache"
        self.paused = True

    def resume_scheduler(self) -> None:
        self.paused = False

    def step(self) -> list[Any]:
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


def asked(**lengths: int) -> list[Request]:
    return [Request(int(name[1:]), [1], seed=0, max_new_tokens=length, greedy=True) for name, length in lengths.items()]


def test_a_quantum_gives_out_what_its_last_step_made(engine: QuantumEngine) -> None:
    vllm = cast("AsynchronousEngine", engine._engine)
    made = engine.run(asked(r1=3, r2=5, r3=9), 5)
    assert made.engine_steps == 5
    assert [(row.request_id, len(row.tokens)) for row in map(made.request, range(len(made)))] == [(1, 3), (2, 5)]
    assert (vllm.made["3"], len(vllm.batch_queue), vllm.paused) == (5, 0, False)
    made = engine.run([], 100)
    assert [(row.request_id, len(row.tokens)) for row in map(made.request, range(len(made)))] == [(3, 9)]
    assert not vllm.batch_queue, "nor is one in flight that was started before the end of all requests was known"


def test_tokens_of_a_quantum_have_its_version(engine: QuantumEngine) -> None:
    vllm = cast("AsynchronousEngine", engine._engine)
    engine.run(asked(r1=6), 4)
    vllm.output_processor.request_states = {
        "1": SimpleNamespace(external_req_id="1", detokenizer=SimpleNamespace(num_output_tokens=lambda: vllm.made["1"]))
    }
    vllm.reset_prefix_cache = lambda: True  # type: ignore[attr-defined]
    engine.change_version(7)
    vllm.output_processor.request_states = {}
    assert engine.run([], 100).versions.tolist() == [[0, 0, 0, 0, 7, 7]]
