"""Weight updates between two quanta with running requests, against Hugging Face transformers."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from dagrl.errors import RunError
from tests.integration import vllm_calls
from tests.integration.vllm_models import chosen, hf_logprobs, make_checkpoint, make_config
from tests.integration.vllm_ranks import Engine, Ranks, requests

Started = tuple[Engine, list[Path]]


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=lambda tp: f"tp{tp}")
def started(
    request: pytest.FixtureRequest, vllm_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    """An engine with two slots, for prompts longer than a KV-cache block (128 tokens on CPUs)."""
    root = tmp_path_factory.mktemp("models")
    checkpoints = [make_checkpoint(root / str(seed), seed=seed) for seed in range(3)]
    config = make_config(checkpoints[0], {"vllm_cfg": {"max_num_seqs": 2, "kv_cache_memory_bytes": 16 << 20}}, length=320)
    with vllm_ranks.engine(config, request.param) as engine:
        yield engine, checkpoints


LONG_PROMPT = [3 + token % 90 for token in range(0, 7 * 290, 7)]


def check_running_requests(
    engine: Engine, write: Callable[[int, int], object], logprobs: Callable[[int, Sequence[int]], torch.Tensor], first: int
) -> None:
    """Checks that requests go on from the old weights' cache over two updates, and that later ones see no old prefix.

    `write` gives the engine weights as a version, from `first` on; `logprobs` are those of tokens after the long prompt.
    """
    write(0, first)
    assert len(engine.generate(requests([first + 1], [LONG_PROMPT], new=12, steps=5))) == 0
    write(1, first + 1)
    assert len(engine.generate(requests([first + 2], [LONG_PROMPT], new=12, steps=4))) == 0
    write(2, first + 2)
    running, after = engine.run(requests([], []))
    assert running.versions == [first] * 5 + [first + 1] * 4 + [first + 2] * 3
    assert (torch.tensor(running.logprobs).double() - logprobs(0, running.tokens))[:5].abs().max() < 1e-5
    assert after.versions == [first + 1] * 4 + [first + 2] * 8
    assert (torch.tensor(after.logprobs).double() - logprobs(1, after.tokens))[:4].abs().max() < 1e-5


def test_running_requests_continue_and_new_ones_see_no_old_prefix(started: Started) -> None:
    engine, checkpoints = started

    def write(number: int, version: int) -> None:
        engine.on_all(vllm_calls.write_weights, checkpoints[number], version)

    def logprobs(number: int, tokens: Sequence[int]) -> torch.Tensor:
        return chosen(hf_logprobs(checkpoints[number], LONG_PROMPT, tokens), tokens)

    check_running_requests(engine, write, logprobs, 0)


def test_requests_that_wait_for_a_slot_see_no_old_prefix(started: Started) -> None:
    """They arrived before the update, while others with their prompt still run on the old weights' cache."""
    engine, checkpoints = started
    engine.on_all(vllm_calls.write_weights, checkpoints[0], 0)
    waiting = requests([21, 22, 23, 24], [LONG_PROMPT] * 4, new=12, steps=5)
    assert len(engine.generate(waiting)) == 0
    engine.on_all(vllm_calls.write_weights, checkpoints[1], 1)
    rows = {row.request_id: row for row in engine.run(requests([], []))}
    assert [rows[name].versions for name in (21, 22)] == [[0] * 5 + [1] * 7] * 2
    for name in (23, 24):
        assert rows[name].versions == [1] * 12
        new = chosen(hf_logprobs(checkpoints[1], LONG_PROMPT, rows[name].tokens), rows[name].tokens)
        assert (torch.tensor(rows[name].logprobs).double() - new).abs().max() < 1e-5


@pytest.mark.parametrize("cached", [0, 9, 60])
def test_a_reset_leaves_no_block_that_a_hash_finds(started: Started, cached: int) -> None:
    engine, _ = started
    assert engine.on_all(vllm_calls.forget_blocks, cached, False) == [(True, 0, 0)] * engine.tp
    if cached:
        refused = engine.on_all(vllm_calls.forget_blocks, cached, True)
        assert refused == [(False, 2 * cached, cached)] * engine.tp, "a block in use keeps all"


def test_no_token_from_torn_weights(started: Started) -> None:
    engine, checkpoints = started
    engine.on_all(vllm_calls.tear_weights, checkpoints[1])
    with pytest.raises(RunError, match="torn"):
        engine.generate(requests([5], [[5, 6]]))
    engine.on_all(vllm_calls.write_weights, checkpoints[2], 3)
    [row] = engine.run(requests([6], [[5, 6]]))
    expected = chosen(hf_logprobs(checkpoints[2], [5, 6], row.tokens), row.tokens)
    assert (torch.tensor(row.logprobs).double() - expected).abs().max() < 1e-5
    assert set(row.versions) == {3}
