"""Generation in quanta: requests, seeds, warm-up and the sampled distribution, against transformers."""

import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dagrl.errors import DataError, MissingDependencyError, RunError
from dagrl.rl.generation import merge_generated
from tests.integration import vllm_calls
from tests.integration.vllm_models import chosen, hf_logprobs, make_checkpoint, make_config
from tests.integration.vllm_ranks import Engine, Ranks, call, requests
from tests.unit.workers.vllm_double import AsyncEngineDouble

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
FEW_TOKENS = {
    "vllm_cfg": {"max_num_seqs": 8, "kv_cache_memory_bytes": 8 << 20},
    "vllm_kwargs": {"max_num_batched_tokens": 64},
}
"""Token limit of an engine step, below two long prompts."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


ENGINES = [
    pytest.param((1, 1), id="tp1", marks=pytest.mark.slow),  # test_vllm_async.py compares steps with bursts
    pytest.param((1, 4), id="tp1, bursts"),
    pytest.param((2, 4), id="tp2, bursts"),
]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, vllm_ranks: Ranks, checkpoint: Path) -> Iterator[Engine]:
    tp, steps = request.param
    options = {"vllm_cfg": {**FEW_TOKENS["vllm_cfg"], "num_scheduler_steps": steps}}
    with vllm_ranks.engine(make_config(checkpoint, options), tp) as engine:
        yield engine


def test_quanta_are_bounded_and_new_requests_join(engine: Engine) -> None:
    first = engine.generate(requests([1, 2], PROMPTS[:2], new=6, steps=4))
    assert (len(first), first.unfinished, first.engine_steps) == (0, 2, 4)
    second = engine.generate(requests([3], PROMPTS[2:], new=6, steps=4))
    assert second.request_ids.tolist() == [1, 2]
    assert (second.lengths.tolist(), second.unfinished, second.engine_steps) == ([6, 6], 1, 4)
    third = engine.generate(requests([], [], steps=4))
    assert (third.request_ids.tolist(), third.unfinished, third.engine_steps) == ([3], 0, 2)
    assert third.finish_reasons == ("length",)
    idle = engine.generate(requests([], [], steps=4))
    assert (len(idle), idle.unfinished, idle.engine_steps) == (0, 0, 0)


def test_an_engine_of_one_rank_ends_a_quantum_by_the_clock(engine: Engine) -> None:
    """The time limit passes in the first step. Tensor-parallel ranks run all requested steps."""
    together = engine.run(requests([1, 2], PROMPTS[:2], new=6))
    made = engine.generate(requests([1, 2], PROMPTS[:2], new=6, steps=4, seconds=1e-9))
    assert (made.engine_steps, made.unfinished) == (1 if engine.tp == 1 else 4, 2)
    assert engine.run(requests([], [])) == together, "they continue unchanged"


def test_a_seed_determines_tokens_in_any_batch_and_their_logprobs_bit_for_bit(engine: Engine) -> None:
    [alone] = engine.run(requests([7], [PROMPTS[0]]))
    company = engine.run(requests([5, 6, 7, 8], [PROMPTS[1], PROMPTS[0], PROMPTS[0], PROMPTS[2]]))
    assert company[2].tokens == alone.tokens and company[2].logprobs == alone.logprobs
    assert company[1].tokens != alone.tokens


def test_prompts_that_do_not_fit_an_engine_step_together(engine: Engine) -> None:
    prompts = [[5 + (row + token) % 40 for token in range(40)] for row in range(3)]
    together = engine.run(requests([1, 2, 3], prompts, new=4))
    alone = [row for request, prompt in enumerate(prompts, 1) for row in engine.run(requests([request], [prompt], new=4))]
    assert [row.tokens for row in together] == [row.tokens for row in alone]


def test_greedy_takes_the_likeliest_and_reports_the_models_logprobs(engine: Engine, checkpoint: Path) -> None:
    for row, prompt in zip(engine.run(requests([1, 2, 3], PROMPTS, greedy=True)), PROMPTS, strict=True):
        expected = hf_logprobs(checkpoint, prompt, row.tokens)
        assert row.tokens == expected.argmax(-1).tolist()
        assert (torch.tensor(row.logprobs).double() - chosen(expected, row.tokens)).abs().max() < 1e-5


def test_padding_rows_are_skipped_and_bad_requests_rejected(engine: Engine) -> None:
    batch = requests([1, 2], [PROMPTS[0], []], new=1)
    assert engine.generate(batch).request_ids.tolist() == [1]
    bad = {
        "1 to 47": requests([4], [[5] * 48]),
        "from 5 to 123456789": requests([4], [[5, 123456789]]),
        "from -7 to 6": requests([4], [[6, -7]]),
    }
    for message, wrong in bad.items():
        with pytest.raises(DataError, match=message):
            engine.generate(wrong)
    assert engine.generate(requests([], [])).unfinished == 0


def test_the_double_has_vllms_signatures(vllm_ranks: Ranks) -> None:
    """Unit tests run `QuantumEngine` over a double; each of its methods must accept what vLLM's accepts by that name."""
    methods = {name: one for name, one in vars(AsyncEngineDouble).items() if inspect.isfunction(one) and name[0] != "_"}
    signatures = vllm_ranks.apart(vllm_calls.signatures, list(methods))
    for (name, double), expected in zip(methods.items(), signatures, strict=True):
        names = list(inspect.signature(double).parameters)
        assert names == list(expected)[: len(names)], name
        assert all(list(expected.values())[len(names) :]), name


def test_aborted_requests_are_gone(engine: Engine) -> None:
    engine.generate(requests([1, 2, 3], PROMPTS, steps=2))
    assert engine.on_all(call, "abort_requests", [2, 99]) == [1] * engine.tp
    assert [row.request_id for row in engine.run(requests([], []))] == [1, 3]
    engine.generate(requests([4, 5], PROMPTS[:2], steps=2))
    assert engine.on_all(call, "abort_requests") == [2] * engine.tp
    assert engine.generate(requests([], [])).unfinished == 0


def test_a_warm_up_leaves_nothing(engine: Engine) -> None:
    before = engine.run(requests([1], PROMPTS[:1]))
    engine.generate(requests([2], PROMPTS[1:2], steps=2))
    for result in engine.on_all(vllm_calls.warm_up, requests([1, 1, 1], [[1] * 48] * 3, new=1, steps=16)):
        assert result.engine_steps > 0
    after = engine.run(requests([1], PROMPTS[:1]))
    assert [row.request_id for row in after] == [1, 2]
    assert after[0] == before[0]


def test_a_cpu_engine_stays_awake(engine: Engine) -> None:
    assert engine.on_all(call, "sleep", 2) == [0] * engine.tp
    engine.on_all(call, "wake_up", ["weights"])
    engine.on_all(call, "wake_up")
    assert len(engine.run(requests([1], PROMPTS[:1]))) == 1


def test_a_rank_with_other_tokens_raises_after_the_first_quantum(engine: Engine) -> None:
    """Detected before any request finishes. A different seed on the last rank makes sampled tokens differ."""
    batches = [requests([1, 2], PROMPTS[:2], new=8, steps=3, seed=rank) for rank in range(engine.tp)]
    parts = engine.on_each(call, [("generate", batch) for batch in batches])
    assert [(len(part), part.unfinished) for part in parts] == [(0, 2)] * engine.tp
    engine.on_all(call, "abort_requests")
    if engine.tp == 1:
        return
    with pytest.raises(RunError, match=r"request 1 runs with 3 new tokens of checksum"):
        merge_generated(parts)


def test_an_engine_leaves_no_file_for_its_rendezvous(engine: Engine) -> None:
    """A killed process would not remove it. The store is in memory for one rank, a connection for several."""
    assert engine.on_all(vllm_calls.world_store) == [{1: "HashStore", 2: "TCPStore"}[engine.tp]] * engine.tp


def test_a_vllm_without_an_engine_argument_is_rejected(engine: Engine) -> None:
    with pytest.raises(MissingDependencyError, match="no_such_argument"):
        engine.on_all(vllm_calls.lacking_argument)


def test_sampling_follows_the_models_distribution(engine: Engine, checkpoint: Path) -> None:
    draws = 400
    rows = engine.run(requests(range(draws), [PROMPTS[0]] * draws, new=1, steps=16))
    probabilities = hf_logprobs(checkpoint, PROMPTS[0], [0])[0].exp()
    counts = Counter(row.tokens[0] for row in rows)
    for token in probabilities.topk(5).indices.tolist():
        share = float(probabilities[token])
        assert abs(counts[token] / draws - share) < 5 * (share * (1 - share) / draws) ** 0.5
