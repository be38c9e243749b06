"""A test double of vLLM's engine with asynchronous scheduling, which vLLM itself has on GPUs only."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np


class AsyncEngineDouble:
    """Stands in for `vllm.LLMEngine` and its `EngineCore`: each step returns what the previous one generated.

    `params` of a request is its length in tokens. Methods have vLLM's signatures
    (`tests/integration/test_vllm_generate.py` compares them).
    """

    model_config = SimpleNamespace(max_model_len=100, get_vocab_size=lambda: 10)

    def __init__(self) -> None:
        self.engine_core = SimpleNamespace(engine_core=self)
        self.batch_queue: deque[list[str]] = deque()
        self.left: dict[str, int] = {}
        self.made: dict[str, int] = {}
        self.paused = False
        self.aborted: list[str] = []
        self.salts: dict[str, str] = {}  # cache salt of each request
        self.caches_dropped: list[bool] = []  # whether running requests lost theirs too
        self.broken = False
        self.forgets = False  # requests are accepted and lost
        self.output_processor = SimpleNamespace(request_states={})
        self.seconds = iter(())  # duration of each step; 0 when exhausted
        self.now = 0.0

    def add_request(
        self, request_id: str, prompt: dict[str, Any], params: int, arrival_time: Any = None, lora_request: Any = None
    ) -> None:
        assert request_id not in self.left and lora_request is None
        if not self.forgets:
            self.left[request_id], self.made[request_id] = params, 0
            self.salts[request_id] = prompt["cache_salt"]
        self.output_processor.request_states[f"{request_id}-0"] = state_of(request_id, [])

    def has_unfinished_requests(self) -> bool:
        return bool(self.left) or bool(self.batch_queue)

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> None:
        assert (mode, clear_cache) == ("keep", False), "running requests keep their KV cache"
        self.paused = True

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        assert not self.batch_queue
        self.caches_dropped.append(reset_running_requests)
        return True

    def sleep(self, level: int = 1) -> None:
        assert not self.batch_queue

    def abort_request(self, request_ids: list[str]) -> None:
        assert not self.batch_queue
        self.aborted += request_ids
        for name in request_ids:
            del self.left[name]

    def resume_scheduler(self) -> None:
        self.paused = False

    def step(self) -> list[Any]:
        if self.broken:
            raise OSError("a step broke")
        if self.forgets:
            return []
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
        logprobs = [np.full(len(tokens), -1.0, np.float32)]
        completion = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason="length")
        return SimpleNamespace(finished=True, request_id=name, outputs=[completion])


def states_of(vllm: AsyncEngineDouble) -> dict[str, Any]:
    """Returns the output processor's states of the running requests, by vLLM's internal ids."""
    return {f"{name}-0": state_of(name, list(range(vllm.made[name]))) for name in vllm.left}


def state_of(name: str, tokens: list[int]) -> Any:
    detokenizer = SimpleNamespace(output_token_ids=tokens, num_output_tokens=lambda: len(tokens))
    processor = SimpleNamespace(logprobs=[np.array([-float(token)], np.float32) for token in tokens])
    return SimpleNamespace(external_req_id=name, detokenizer=detokenizer, logprobs_processor=processor)
