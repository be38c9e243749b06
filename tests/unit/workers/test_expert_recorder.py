"""The recorder of experts, driven by the batches that a model runner would have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dagrl.rl.routed_experts import MISSING, Record, RoutedLayers
from dagrl.workers.vllm.expert_recorder import ExpertRecorder

BLOCK, EXPERTS = 4, 100


class RunnerDouble:
    """Runs steps: a token's only expert, in one layer, is its position plus a hundred times the step, modulo 97."""

    def __init__(self, recorder: ExpertRecorder) -> None:
        self.recorder, self.steps = recorder, 0
        self.input_batch: Any = None
        router = SimpleNamespace(set_capture_fn=lambda function: setattr(self, "told", function))
        layer = torch.nn.Linear(1, 1)
        object.__setattr__(layer, "router", router)
        object.__setattr__(layer, "layer_id", 0)
        object.__setattr__(layer, "_quant_method", SimpleNamespace(is_monolithic=False))
        caches = SimpleNamespace(block_size=BLOCK)
        recorder.attach(
            layer, SimpleNamespace(cache_config=caches, scheduler_config=SimpleNamespace(max_num_batched_tokens=64))
        )
        recorder.cache_holds(16)

    def step(self, **spans: tuple[int, int]) -> dict[str, list[int]]:
        """Runs the positions `start` to `end` of each request. Returns the ids by request."""
        self.steps += 1
        made = {name: [(place + 100 * self.steps) % 97 for place in range(*span)] for name, span in spans.items()}
        counts = {name: end - start for name, (start, end) in spans.items()}
        ids = [number for numbers in made.values() for number in numbers]
        self.told(torch.tensor([*ids, 1, 1])[:, None])  # padded
        starts = np.array([start for start, _ in spans.values()])
        self.input_batch = SimpleNamespace(req_ids=list(spans), num_computed_tokens_cpu=starts)
        self.recorder.step(self, SimpleNamespace(total_num_scheduled_tokens=len(ids), num_scheduled_tokens=counts))
        return made


def ids(record: Record) -> list[int]:
    return record[:, 0].tolist()


def test_rows_are_attributed_to_their_requests() -> None:
    recorder = ExpertRecorder(RoutedLayers(1, EXPERTS, 1))
    runner = RunnerDouble(recorder)
    recorder.follow("a", [5, 6, 7], 0)
    first = runner.step(a=(0, 3))
    recorder.follow("b", [8, 9], 0)
    second = runner.step(b=(0, 2), a=(3, 4))
    assert ids(recorder.peek("a", [20])) == first["a"]
    third = runner.step(a=(4, 5), b=(2, 3))
    assert ids(recorder.take("a", [20, 21, 22])) == first["a"] + second["a"] + third["a"]
    runner.step(b=(3, 4), a=(5, 6))  # a step that was prepared before the end of `a` was known
    assert ids(recorder.take("b", [30, 31])) == second["b"] + third["b"]


def test_cached_blocks_have_the_record_of_the_request_that_computed_them() -> None:
    recorder = ExpertRecorder(RoutedLayers(1, EXPERTS, 1))
    runner = RunnerDouble(recorder)
    prompt = [5, 6, 7, 8, 9, 10]
    recorder.follow("a", prompt, 0)
    computed = runner.step(a=(0, 6))["a"]
    recorder.follow("b", prompt, 0)
    recorder.follow("other", [5, 6, 7, 1, 9, 10], 0)  # another block
    recorder.follow("later", prompt, 1)  # another version of the weights
    rest = runner.step(b=(4, 6), other=(4, 6), later=(4, 6))
    for name, found in (("b", computed[:4]), ("other", [MISSING] * 4), ("later", [MISSING] * 4)):
        assert ids(recorder.take(name, [20])) == found + rest[name]
    made = runner.step(a=(6, 8))["a"]
    recorder.take("a", [20, 21, 22])  # the block of 9, 10, 20, 21 is kept at the end of its request
    recorder.follow("next turn", [*prompt, 20, 21, 22, 40], 0)
    last = runner.step(**{"next turn": (8, 10)})
    assert ids(recorder.take("next turn", [50])) == computed + made + last["next turn"]


def test_a_prefix_cache_that_was_emptied_is_not_used() -> None:
    recorder = ExpertRecorder(RoutedLayers(1, EXPERTS, 1))
    runner = RunnerDouble(recorder)
    recorder.follow("a", [5, 6, 7, 8, 9], 0)
    runner.step(a=(0, 5))
    recorder.forget_prefixes()
    recorder.follow("b", [5, 6, 7, 8, 9], 0)
    rest = runner.step(b=(4, 5))["b"]
    assert ids(recorder.take("b", [20])) == [MISSING] * 4 + rest


def test_tokens_computed_again_keep_their_first_record() -> None:
    """A preempted request starts again; its first tokens were sampled from the first run."""
    recorder = ExpertRecorder(RoutedLayers(1, EXPERTS, 1))
    runner = RunnerDouble(recorder)
    recorder.follow("a", [5, 6], 0)
    first = runner.step(a=(0, 2))["a"]
    second = runner.step(a=(2, 3))["a"]
    again = runner.step(a=(0, 4))["a"]
    assert ids(recorder.take("a", [20, 21, 22])) == first + second + again[3:]
