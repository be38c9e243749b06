"""Refit from every train layout to vLLM at tp1 and tp2: afterwards both compute the same log-probabilities.

Real workers in a handful of actors, which become one group after the other, because their imports take longest. Nothing
here knows how weights are laid out: vLLM samples with what it received, and Megatron scores vLLM's tokens.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from safetensors.torch import load_file, save_file

from dagrl.config import Config
from dagrl.graphs.phases import TOKENS, demonstration_step, generate
from dagrl.refit import Refit
from dagrl.refit.connect import refit
from dagrl.rl.generation import Generated
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Shard, phase
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.runtime.shapes import Batch, Bucket
from dagrl.runtime.worker import WorkerContext
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.workers.megatron import MegatronWorker
from dagrl.workers.vllm import VllmWorker
from tests.integration.megatron_reference import VOCABULARY, make_model

pytest.importorskip("megatron.core")
pytest.importorskip("vllm")

START_S = 280.0  # workers import Megatron and vLLM first
ROWS, PROMPT, NEW = 8, 10, 6
WIDTH = PROMPT + NEW
RESULT_BYTES = 64 << 10  # of one worker, enforced by the runtime; the weights of the smallest model are 10 times as large
DENSE = {
    "dp2": ParallelLayout(dp=2),
    "tp2": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "cp2": ParallelLayout(cp=2),
    "tp2pp2": ParallelLayout(tp=2, pp=2),
    "pp2vpp2": ParallelLayout(pp=2, vpp=2),
}
EXPERTS = {"dp2ep2": ParallelLayout(dp=2, ep=2)}


@phase(inputs=TOKENS)
def logprob_rows(train: Shard, batch):
    return train.reduce("merge_rows", train.map("logprobs", batch, model="policy"))


@dataclass(frozen=True)
class Case:
    """One train layout and one generation size. Cases of one model and size are adjacent and share an engine."""

    model: str
    generation_tp: int
    name: str
    layout: ParallelLayout

    def __str__(self) -> str:
        return f"{self.model}-{self.name}-to-tp{self.generation_tp}"


CASES = [
    Case(model, tp, name, layout)
    for model, layouts in {"qwen3": DENSE, "qwen3_tied": DENSE, "qwen3_moe": EXPERTS, "glm4_moe": EXPERTS}.items()
    for tp in (1, 2)
    for name, layout in layouts.items()
]
IN_CI = {"qwen3-pp2vpp2-to-tp1", "glm4_moe-dp2ep2-to-tp1"}
"""The quickstart (test_main_job.py) has dp2, test_vllm_refit.py both ranks of an engine with tp2, and test_megatron_refit.py
tied embeddings."""


class TrainActor(MegatronWorker):
    """A Megatron worker that can be constructed again."""

    def become(self, context: WorkerContext, config: Config) -> None:
        self.shutdown()
        MegatronWorker.__init__(self, context, config)


class GenerationActor(VllmWorker):
    """A vLLM worker that can be constructed again."""

    def become(self, context: WorkerContext, config: Config) -> None:
        self.shutdown()
        VllmWorker.__init__(self, context, config)


class Groups:
    """The actors and their current groups."""

    def __init__(self, models: Path) -> None:
        self.models = models
        context, config = WorkerContext("any", 0, ParallelLayout()), self.config("qwen3", 1)
        self._start = lambda worker: _actor(worker, context, config)
        self._train = [self._start(TrainActor) for _ in range(2)]  # more when a layout needs them
        self._generation = [self._start(GenerationActor)]
        self._engine: tuple[tuple[str, int], WorkerGroup] | None = None

    def config(self, model: str, generation_tp: int, start: str = "") -> Config:
        """Train workers start from the model, generation workers from other weights of the same shapes."""
        engine = {"max_num_seqs": ROWS, "kv_cache_memory_bytes": 8 << 20, "tensor_parallel_size": generation_tp}
        policy = {
            "model_name": str(self.models / (start + model)),
            "train_micro_batch_size": 2,
            "max_total_sequence_length": WIDTH,
            "generation": {"max_new_tokens": NEW, "vllm_cfg": engine},
        }
        return Config.model_validate({"name": "test", "algorithm": "grpo", "data": {}, "policy": policy})

    def train(self, case: Case) -> WorkerGroup:
        """Makes a train group."""
        self._train += [self._start(TrainActor) for _ in range(case.layout.world_size - len(self._train))]
        return _become(self._train, "train", case.layout, self.config(case.model, case.generation_tp))

    def generation(self, case: Case) -> WorkerGroup:
        """Returns the current generation group, or makes one for another model or size."""
        key = (case.model, case.generation_tp)
        if self._engine is None or self._engine[0] != key:
            layout = ParallelLayout(tp=case.generation_tp)
            self._generation += [self._start(GenerationActor) for _ in range(layout.world_size - len(self._generation))]
            self._engine = key, _become(self._generation, "generation", layout, self.config(*key, start="other_"))
        return self._engine[1]

    def end(self) -> None:
        """Kills the actors."""
        for actor in [*self._train, *self._generation]:
            ray.kill(actor)


def _actor(worker: type, context: WorkerContext, config: Config) -> Any:
    options = {"num_cpus": 0, "concurrency_groups": {"_ray_system": 6}}
    return ray.remote(runtime_env={"env_vars": worker.environment(config)}, **options)(worker).remote(context, config)


def _become(actors: Sequence[Any], role: str, layout: ParallelLayout, config: Config) -> WorkerGroup:
    actors = actors[: layout.world_size]
    contexts = [WorkerContext(role, rank, layout) for rank in range(layout.world_size)]
    ray.get([actor.become.remote(context, config) for actor, context in zip(actors, contexts, strict=True)], timeout=START_S)
    group = WorkerGroup.from_actors(actors, layout, role, call_timeout_s=START_S)
    group.setup()
    return group


@pytest.fixture(scope="module")
def groups(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    directory = tmp_path_factory.mktemp("models")
    for model in {case.model for case in CASES}:
        make_model(model, directory)
        make_other_weights(directory / model, directory / f"other_{model}")
    groups = Groups(directory)
    yield groups
    groups.end()


def make_other_weights(source: Path, target: Path) -> None:
    """Writes a model of the same shapes with wrong weights."""
    shutil.copytree(source, target)
    weights = {name: tensor.flip(-1).contiguous() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def scheduler(case: Case, groups: Groups) -> Iterator[Scheduler]:
    """The two groups of the case, connected for refits, with their phases compiled and warmed up."""
    train, generation = groups.train(case), groups.generation(case)
    connected = Refit.connect(
        train,
        generation,
        dtype="float32",
        tied_embeddings=case.model == "qwen3_tied",
        verify="checksum",
    )
    assert connected.plan.sources == case.layout.world_size and connected.plan.destinations == case.generation_tp
    assert 0 < connected.plan.summary().floor_s and f"to {case.generation_tp} ranks" in str(connected)
    rows = Bucket(ROWS // case.layout.dp, WIDTH)
    denominators = {"global_valid_tokens": 1.0, "global_valid_sequences": 1.0}
    with Scheduler([train, generation], SchedulerOptions(fallback="error", result_bytes=RESULT_BYTES)) as scheduler:
        scheduler.add(connected.phase, warmup_value=0)
        scheduler.add(generate, buckets=[Bucket(1, 1), Bucket(ROWS, PROMPT)])
        scheduler.add(logprob_rows, buckets=[rows])
        scheduler.add(demonstration_step, buckets=[rows], scalars=denominators)
        scheduler.compile()
        scheduler.warmup()
        yield scheduler


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (str(case) not in IN_CI)) for case in CASES], ids=str
)
def test_after_a_refit_both_sides_give_the_same_logprobs(case: Case, scheduler: Scheduler) -> None:
    differences, tokens = [], []
    for version in (1, 2):
        (reports,) = scheduler.replay(refit, version).result()
        received = sum(report.bytes_received for report in reports)
        assert len(pickle.dumps(reports)) < 10_000
        assert received > 100_000
        batch, sampled = sample(scheduler, version)
        scored = scheduler.replay(logprob_rows, batch).result()["logprobs"]
        inside = sampled != 0
        differences.append(float(np.abs(scored - sampled)[inside].max()))
        tokens.append(batch["tokens"])
        learn(scheduler, batch, inside)
    assert max(differences) < 1e-4
    assert (tokens[0] != tokens[1]).any()  # the second refit carried the optimizer step


def sample(scheduler: Scheduler, version: int) -> tuple[Batch, np.ndarray]:
    """Returns prompts and completions as rows, and vLLM's log-probabilities of the completions (0 elsewhere)."""
    generator = np.random.default_rng(5)
    lengths = generator.integers(2, PROMPT + 1, ROWS)
    prompts = generator.integers(0, VOCABULARY, (ROWS, PROMPT)) * (np.arange(PROMPT) < lengths[:, None])
    requests = Batch(
        {
            "tokens": prompts,
            "lengths": lengths,
            "request_ids": np.arange(ROWS),
            "seeds": np.arange(ROWS),
            "max_new_tokens": np.full(ROWS, NEW),
            "greedy": np.zeros(ROWS, np.int64),
        }
    )
    (generated,) = scheduler.replay(generate, requests).result()
    assert isinstance(generated, Generated) and len(generated) == ROWS
    tokens, sampled = np.zeros((ROWS, WIDTH), np.int64), np.zeros((ROWS, WIDTH), np.float32)
    for row in range(ROWS):
        done, start = generated.request(row), int(lengths[row])
        assert set(done.versions) == {version}
        tokens[row, :start] = prompts[row, :start]
        tokens[row, start : start + len(done.tokens)] = done.tokens
        sampled[row, start : start + len(done.tokens)] = done.logprobs
    return Batch({"tokens": tokens, "lengths": lengths + generated.lengths}), sampled


def learn(scheduler: Scheduler, batch: Batch, inside: np.ndarray) -> None:
    """Takes one optimizer step, which changes the weights."""
    mask = inside.astype(np.float32)
    scalars = {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float(ROWS), "lr": 0.02}
    scheduler.replay(demonstration_step, batch.with_fields(loss_mask=mask).with_scalars(**scalars)).result()
