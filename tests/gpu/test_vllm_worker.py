"""The vLLM worker as an actor on a GPU: quanta through a compiled graph, updates in place under CUDA graphs, sleep.

The reference is transformers in float32 with the same bfloat16 weights. bfloat16 differs by 0.01 to 0.03 in the mean; a
stale weight by more than 0.5.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.config import Config
from dagrl.errors import RunError
from dagrl.graphs.phases import generate
from dagrl.rl.generation import FinishedRequest, Generated, RequestOptions, options_text
from dagrl.runtime.actors import Resources
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.runtime.shapes import Batch, Bucket
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.workers.vllm.burst_graphs import RELEASES
from tests.integration import vllm_calls
from tests.integration.vllm_models import chosen, make_checkpoint, make_config
from tests.integration.vllm_ranks import requests

pytest.importorskip("vllm")
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **{"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    },
    "0.6B": {
        **{"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 151_936},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    },
}
PROMPTS = [[3 + (7 * row + 11 * place) % 900 for place in range(5 + 9 * row)] for row in range(8)]
LONG_PROMPT = [3 + token % 900 for token in range(0, 7 * 200, 7)]
CLOSE = 0.05  # mean difference of log-probabilities that bfloat16 explains


@dataclass
class Engine:
    group: WorkerGroup
    scheduler: Scheduler
    checkpoints: list[Path]
    replays: bool = False  # whether this vLLM's decode steps have graphs (`dagrl.workers.vllm.burst_graphs`)

    def quantum(self, batch: Batch) -> Generated:
        result: Generated
        (result,) = self.scheduler.replay(generate, batch).result()
        return result

    def run(self, batch: Batch) -> list[FinishedRequest]:
        results = [self.quantum(batch)]
        while results[-1].unfinished:
            results.append(self.quantum(requests([], [])))
        rows = [result.request(row) for result in results for row in range(len(result))]
        return sorted(rows, key=lambda row: row.request_id)

    def write(self, checkpoint: int, version: int) -> None:
        self.group.call_function(vllm_calls.write_weights, self.checkpoints[checkpoint], version)

    def check(self, checkpoint: int, rows: Sequence[FinishedRequest], prompts: Sequence[Sequence[int]]) -> None:
        assert difference(self.checkpoints[checkpoint], rows, prompts) < CLOSE


CASES = {"tiny, eager": ("tiny", True), "tiny, graphs": ("tiny", False), "0.6B, graphs": ("0.6B", False)}


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def engine(request: pytest.FixtureRequest, cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    shape, eager = request.param
    root = tmp_path_factory.mktemp("models")
    checkpoints = [make_gpu_checkpoint(root / str(seed), seed, **SHAPES[shape]) for seed in range(2)]
    with started(checkpoints, gpu_config(checkpoints[0], eager)) as engine:
        engine.replays = not eager and version("vllm").startswith(RELEASES)
        yield engine


@contextmanager
def started(checkpoints: list[Path], config: Config, tp: int = 1, *, warm: bool = True) -> Iterator[Engine]:
    """Actors of one engine with a compiled and (`warm`) warmed-up `generate` phase."""
    from dagrl.workers.vllm import VllmWorker

    group = WorkerGroup.create("generation", VllmWorker, ParallelLayout(tp=tp), config, resources=Resources(num_gpus=1))
    try:
        with Scheduler([group], SchedulerOptions(executor="compiled", fallback="error")) as scheduler:
            scheduler.add(generate, buckets=[Bucket(1, 1), Bucket(64, 256)], result_bytes=1 << 20)
            scheduler.compile()
            if warm:
                scheduler.warmup()
            yield Engine(group, scheduler, checkpoints)
    finally:
        group.shutdown(20.0)


def gpu_config(model: Path, eager: bool, tp: int = 1) -> Config:
    content: dict[str, Any] = make_config(model, length=256).model_dump()
    content["policy"]["precision"] = "bfloat16"
    content["policy"]["generation"]["colocated"] = {"enabled": True}
    content["policy"]["generation"]["vllm_cfg"] |= {
        "enforce_eager": eager,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": 2 << 30,
        "gpu_memory_utilization": 0.3,
        "tensor_parallel_size": tp,
    }
    return Config.model_validate(content)


def make_gpu_checkpoint(directory: Path, seed: int, model_type: str = "qwen3", **sizes: Any) -> Path:
    """Random bfloat16 weights with distributions far from uniform, and routing without near ties."""

    def spread(name: str) -> float:
        return float((2.0 if "embed" in name or "mlp.gate." in name else 0.5) / sizes["hidden_size"] ** 0.5)

    more: dict[str, Any] = {"tied": True, "dtype": torch.bfloat16, "device": "cuda", "max_position_embeddings": 1024}
    return make_checkpoint(directory, model_type, seed=seed, norms=0.1, spread=spread, **more, **sizes)


def difference(
    checkpoint: Path, rows: Sequence[FinishedRequest], prompts: Sequence[Sequence[int]], device: str = "cuda"
) -> float:
    """Returns the mean difference of the rows' log-probabilities from transformers'."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).float().to(device).eval()
    return mean_difference(lambda tokens: model(tokens.to(device)).logits[0].float(), rows, prompts)


def mean_difference(
    logits_of: Callable[[Tensor], Tensor], rows: Sequence[FinishedRequest], prompts: Sequence[Sequence[int]]
) -> float:
    found: list[Tensor] = []
    for row, prompt in zip(rows, prompts, strict=True):
        with torch.no_grad():
            logits = logits_of(torch.tensor([[*prompt, *row.tokens]]))
        expected = chosen(torch.log_softmax(logits[len(prompt) - 1 : -1], -1).cpu(), list(row.tokens))
        found.append((torch.tensor(list(row.logprobs)) - expected).abs())
    return float(torch.cat(found).mean())


def batch(first: int, *, new: int = 24, steps: int = 5, greedy: bool = True, seed: int = 0) -> Batch:
    return requests(range(first, first + len(PROMPTS)), PROMPTS, new=new, steps=steps, greedy=greedy, seed=seed)


def test_quanta_give_the_models_logprobs(engine: Engine) -> None:
    engine.write(0, 0)
    first = engine.quantum(batch(1, greedy=False))
    assert (len(first), first.unfinished, first.engine_steps) == (0, 8, 5)
    rows = engine.run(requests([], [], steps=5))
    assert [row.request_id for row in rows] == list(range(1, 9))
    engine.check(0, rows, PROMPTS)


def test_updates_in_place_between_quanta(engine: Engine) -> None:
    """Running sequences continue. Later ones use only the new weights, even if their prefix was cached before."""
    engine.write(0, 1)
    engine.run(requests([90], [LONG_PROMPT], new=2))
    engine.quantum(batch(1, greedy=False, steps=6))
    engine.write(1, 2)
    assert difference(engine.checkpoints[0], engine.run(requests([91], [LONG_PROMPT], new=8))[-1:], [LONG_PROMPT]) > 0.5
    rows = [row for row in engine.run(batch(101, greedy=False)) if row.request_id > 100]
    engine.check(1, rows, PROMPTS)
    engine.write(0, 3)
    long = engine.run(requests([92], [LONG_PROMPT], new=8))
    engine.check(0, long, [LONG_PROMPT])
    engine.check(0, engine.run(batch(201, greedy=False)), PROMPTS)


def test_versions_of_a_sequence_across_an_update(engine: Engine) -> None:
    engine.write(0, 4)
    engine.quantum(batch(1, new=12, steps=5))
    engine.write(1, 5)
    rows = engine.run(requests([], []))
    assert {tuple(row.versions) for row in rows} == {(4,) * 5 + (5,) * 7}
    heads = [FinishedRequest(row.request_id, row.tokens[:5], row.logprobs[:5], row.versions[:5], "") for row in rows]
    engine.check(0, heads, PROMPTS)


def test_seeds_and_aborts(engine: Engine) -> None:
    engine.write(0, 6)
    engine.run(batch(1))  # prompts are cached from here on: prefills of other lengths round otherwise
    drawn = [[row.tokens for row in engine.run(batch(1, greedy=False, seed=seed))] for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]
    engine.quantum(batch(1, steps=2))
    assert engine.group.call("abort_requests", [2, 3, 99]) == [2]
    assert [row.request_id for row in engine.run(requests([], []))] == [1, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("options", [RequestOptions(), RequestOptions(temperature=0.8, top_p=0.9)], ids=["plain", "top_p"])
def test_replayed_steps_change_no_token(engine: Engine, options: RequestOptions) -> None:
    """Requests end after different steps, so that batches are padded to the sizes of graphs. Half of them are greedy.

    A quarter has `options`.
    """
    engine.write(0, 7)
    engine.run(batch(1))
    drawn = batch(1, greedy=False, steps=64)
    lengths, greedy = np.arange(9, 73, 8), np.arange(8) % 2
    drawn = Batch({**drawn.fields, "max_new_tokens": lengths, "greedy": greedy}, drawn.scalars)
    drawn = drawn.with_scalars(options=options_text({3: options, 7: options}))
    rows: list[list[tuple[list[int], list[float]]]] = []
    for replays in (False, True):
        engine.group.call_function(vllm_calls.replay_steps, replays)
        rows.append([(list(row.tokens), list(row.logprobs)) for row in engine.run(drawn)])
    assert rows[0] == rows[1]
    assert [len(tokens) for tokens, _ in rows[1]] == lengths.tolist()
    sizes = engine.group.call_function(vllm_calls.replay_steps, True)[0]
    assert sizes >= 2 if engine.replays else sizes == 0


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_memory_and_wake_up_restores_it(engine: Engine, level: int) -> None:
    engine.write(0, 7)
    before = engine.run(batch(1))
    addresses = engine.group.call_function(vllm_calls.memory_addresses)
    engine.quantum(batch(11, steps=1))
    with pytest.raises(RunError, match="requests are running"):
        engine.group.call("sleep", level)
    engine.group.call("abort_requests")
    freed = engine.group.call("sleep", level)[0]
    assert freed > 2 << 30, "at least the KV cache"
    with pytest.raises(RunError, match=r"sleeps|dropped"):
        engine.group.call("generate", requests([], []))
    with pytest.raises(RunError, match="memory for weights"):
        engine.write(1, 8)
    engine.group.call("wake_up", ["weights"])
    if level == 2:
        engine.write(0, 8)
    engine.group.call("wake_up", ["kv_cache"])
    assert engine.group.call_function(vllm_calls.memory_addresses) == addresses
    after = engine.run(batch(1))
    assert [row.tokens for row in after] == [row.tokens for row in before]
    engine.check(0, after, PROMPTS)
