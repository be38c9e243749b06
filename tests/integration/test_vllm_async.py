"""Features for asynchronous GRPO: recomputed KV caches, forced lengths, bursts."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dagrl.config import Config
from dagrl.rl.generation import Generated
from tests.integration import vllm_calls
from tests.integration.vllm_models import chosen, hf_logprobs, make_checkpoint, make_config
from tests.integration.vllm_ranks import Engine, Ranks, requests

Started = tuple[Engine, list[Path]]
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def started(vllm_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    root = tmp_path_factory.mktemp("async_models")
    checkpoints = [make_checkpoint(root / str(seed), seed=seed) for seed in range(2)]
    content = make_config(checkpoints[0], length=256).model_dump()
    content["grpo"]["async_grpo"] |= {
        "enabled": True,
        "in_flight_weight_updates": True,
        "recompute_kv_cache_after_weight_updates": True,
    }
    content["policy"]["generation"]["forced_lengths"] = {"median": 10.0}
    content["policy"]["generation"]["vllm_cfg"]["num_scheduler_steps"] = 8
    with vllm_ranks.engine(Config.model_validate(content), 1) as engine:
        yield engine, checkpoints


def test_recomputed_caches_match_the_new_weights(started: Started) -> None:
    """After the update every token comes from the new weights only, not from the old weights' cache."""
    engine, checkpoints = started
    engine.on_all(vllm_calls.write_weights, checkpoints[0], 0)
    assert len(engine.generate(requests([1, 2], [PROMPT, PROMPT[::-1]], new=12, steps=5))) == 0
    engine.on_all(vllm_calls.write_weights, checkpoints[1], 1)
    for row, prompt in zip(engine.run(requests([], [])), (PROMPT, PROMPT[::-1]), strict=True):
        assert row.versions == [0] * 5 + [1] * 7
        found = torch.tensor(row.logprobs).double()
        old, new = (chosen(hf_logprobs(checkpoint, prompt, row.tokens), row.tokens) for checkpoint in checkpoints)
        assert (found - old)[:5].abs().max() < 1e-5
        assert (found - new)[5:].abs().max() < 1e-5


def test_forced_lengths_ignore_the_end_of_a_sequence(started: Started) -> None:
    engine, _ = started
    rows = engine.run(requests([10, 11, 12, 13], [PROMPT, [7], [8], [9]], new=200, steps=400))
    assert [len(row.tokens) for row in rows] == [200] * 4
    assert {row.finish_reason for row in rows} == {"length"}


def assert_same_rows(found: Generated, expected: Generated) -> None:
    both = (sorted(map(made.request, range(len(made))), key=lambda row: row.request_id) for made in (found, expected))
    for ours, theirs in zip(*both, strict=True):
        assert ours.tokens == theirs.tokens
        assert list(ours.logprobs) == pytest.approx(list(theirs.logprobs), abs=1e-5)


def test_bursts_while_requests_wait_for_memory_change_no_token(started: Started) -> None:
    """Ten blocks of 128 tokens for eight requests, which need two blocks each at their ends."""
    engine, _ = started
    prompts = [[3 + (7 * row + token) % 90 for token in range(60 + 8 * row)] for row in range(8)]
    batch = requests(list(range(20, 28)), prompts, new=100, steps=10_000)
    runs = [engine.on_all(vllm_calls.generate_in_little_memory, batch, 10, bursts)[0] for bursts in (False, True)]
    (single, preemptions, steps), (burst, burst_preemptions, lengths) = runs
    assert preemptions and burst_preemptions
    assert set(steps) == {1} and lengths.count(8) > 5, "one run of the scheduler for eight steps"
    assert_same_rows(burst, single)
    assert {len(burst.request(row).tokens) for row in range(8)} == {100}


def test_few_requests_are_admitted_after_a_burst_which_changes_no_token(started: Started) -> None:
    """Forty requests in eight slots, of which one to three end in each step."""
    engine, _ = started
    ids = list(range(30, 70))
    batch = requests(ids, [[3 + row, 7, 9] for row in range(40)], steps=10_000)
    batch.fields["max_new_tokens"][:] = [5 + 7 * row % 31 for row in range(40)]
    runs = [engine.on_all(vllm_calls.generate_with_more_requests_than_slots, batch, few)[0] for few in (0.0, 2.0)]
    (single, steps), (grouped, lengths) = runs
    assert (1, 1) in pairwise(steps) and (1, 1) not in pairwise(lengths)
    assert len(lengths) < len(steps), "fewer runs of the scheduler"
    assert_same_rows(grouped, single)
