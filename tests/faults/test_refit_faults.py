"""Refits that fail halfway, on real workers: no token comes from mixed weights, no rank hangs, and the next refit succeeds.

A worker dies, or its channel breaks, when it posts a given message of the refit; nothing here depends on time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from dagrl.channels import ChannelSpec, open_channel
from dagrl.config import Config
from dagrl.errors import RunError
from dagrl.refit import Refit
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker_group import WorkerGroup, call_together
from dagrl.workers.megatron import MegatronWorker
from dagrl.workers.train import worker as train_worker
from dagrl.workers.vllm import VllmWorker, worker as vllm_worker
from tests.integration.megatron_reference import VOCABULARY, make_model
from tests.integration.vllm_ranks import requests

pytest.importorskip("megatron.core")
pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]

DEADLINE_S = 10.0
TRAIN, GENERATION = ParallelLayout(pp=2), ParallelLayout(dp=2)
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
How = Literal["kill", "break"]


class FailingChannel:
    """A channel whose exchange number `at` (from 0, with the header's) fails."""

    def __init__(self, channel: Any, at: int, how: How) -> None:
        self._channel, self._left, self._how = channel, at, how

    def exchange(self, *messages: Any, **lane: Any) -> Any:
        if self._left == 0 and self._how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._left == 0:
            self._channel.abort("the test cut it")
        self._left -= 1
        return self._channel.exchange(*messages, **lane)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


class Failing:
    """Makes the channels that a worker opens from now on fail."""

    def fail_at(self, at: int, how: How) -> None:
        self._open_by(lambda spec: FailingChannel(open_channel(spec), at, how))

    def fail_no_more(self) -> None:
        self._open_by(open_channel)

    def _open_by(self, opener: Callable[[ChannelSpec], Any]) -> None:
        for module in (train_worker, vllm_worker):
            module.open_channel = opener  # type: ignore[attr-defined]


class FailingTrainer(Failing, MegatronWorker):
    pass


class FailingGenerator(Failing, VllmWorker):
    pass


def make_config(model: Path) -> Config:
    engine = {"max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20, "data_parallel_size": 2}
    policy = {
        "model_name": str(model),
        "max_total_sequence_length": 32,
        "train_micro_batch_size": 2,
        "generation": {"vllm_cfg": engine},
    }
    return Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": policy})


class Groups:
    """The two groups, each of which can be replaced."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.version = 0
        self.start_train()
        self.start_generation()

    def start_train(self) -> None:
        self.train = WorkerGroup.create("train", FailingTrainer, TRAIN, self.config, start_timeout_s=280)

    def start_generation(self) -> None:
        self.generation = WorkerGroup.create("generation", FailingGenerator, GENERATION, self.config, start_timeout_s=280)

    def connect(self) -> None:
        Refit.connect(
            self.train,
            self.generation,
            dtype="float32",
            timeout_s=DEADLINE_S,
            bucket_bytes=20_000,
        )

    def refit(self) -> None:
        self.version += 1
        both = [
            (self.train, "send_weights", [(self.version,)] * 2),
            (self.generation, "receive_weights", [(self.version,)] * 2),
        ]
        call_together(both, deadline=Deadline(4 * DEADLINE_S, "4 * DEADLINE_S"))

    def end(self) -> None:
        for group in (self.train, self.generation):
            group.shutdown(5.0)


@pytest.fixture(scope="module")
def groups(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    model = make_model("qwen3", tmp_path_factory.mktemp("models"))
    groups = Groups(make_config(model))
    yield groups
    groups.end()


def learn(train: WorkerGroup) -> None:
    """Changes the weights to ones that no earlier version had."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 16))
    mask = np.ones((2, 16), np.float32)
    scalars = {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": 2.0, "lr": 0.02}
    train.call("train_step", Batch({"tokens": tokens, "lengths": np.full(2, 16), "loss_mask": mask}, scalars), "likelihood")


def difference(groups: Groups) -> float:
    """Returns the largest difference between the engines' and Megatron's log-probabilities of generated tokens."""
    results = groups.generation.call("generate", requests([1, 2], PROMPTS, new=8, steps=20, seed=groups.version))
    largest = 0.0
    for result in results:
        tokens, lengths, sampled = np.zeros((2, 16), np.int64), np.zeros(2, np.int64), np.zeros((2, 16), np.float32)
        for row in range(len(result)):
            done = result.request(row)
            prompt = PROMPTS[done.request_id - 1]
            assert set(done.versions) == {groups.version}
            lengths[row] = len(prompt) + len(done.tokens)
            tokens[row, : lengths[row]] = [*prompt, *done.tokens]
            sampled[row, len(prompt) : lengths[row]] = done.logprobs
        parts = groups.train.call("logprobs", Batch({"tokens": tokens, "lengths": lengths}))
        scored = next(part for part in parts if part is not None)["logprobs"]
        largest = max(largest, float(np.abs(scored - sampled)[sampled != 0].max()))
    return largest


def check_closed(groups: Groups, ranks: Sequence[int]) -> None:
    """Asserts that the engines refuse to generate."""
    import ray

    for rank in ranks:
        with pytest.raises(Exception, match="weights may be torn"):
            ray.get(groups.generation.actors[rank].generate.remote(requests([7], [[5, 6]])), timeout=20)


@pytest.mark.parametrize(
    ("role", "rank", "how"),
    [("train", 1, "break"), ("generation", 0, "break"), ("train", 1, "kill"), ("generation", 1, "kill")],
    ids=lambda value: str(value),
)
def test_no_engine_uses_a_refit_that_failed_halfway(groups: Groups, role: str, rank: int, how: How) -> None:
    group = groups.train if role == "train" else groups.generation
    groups.connect()
    learn(groups.train)
    groups.refit()
    assert difference(groups) < 1e-4

    import ray

    ray.get(group.actors[rank].fail_at.remote(3, how))
    groups.connect()
    learn(groups.train)
    started = time.monotonic()
    with pytest.raises(RunError, match=r"died|channel"):
        groups.refit()
    assert time.monotonic() - started < 3 * DEADLINE_S
    check_closed(groups, [index for index in range(2) if (role, index, how) != ("generation", rank, "kill")])

    if how == "kill":
        group.shutdown(2.0)
        groups.start_train() if role == "train" else groups.start_generation()
    else:
        ray.get(group.actors[rank].fail_no_more.remote())
    groups.connect()
    learn(groups.train)
    groups.refit()
    assert difference(groups) < 1e-4
