"""Weight updates of a vLLM worker: layout against vLLM's loader, results against Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dagrl.refit.slices import expand
from tests.integration import vllm_calls
from tests.integration.vllm_models import chosen, hf_logprobs, make_checkpoint, make_config, state_of
from tests.integration.vllm_ranks import Engine, Ranks, requests

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, tied": ("qwen2", {"tied": True, "head_dim": 32, "hidden_size": 128}),
    "llama, biases, one kv head": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "moe, few tokens": ("qwen3_moe", {"vocab_size": 15}),  # the second rank's share of the vocabulary is padding alone
}
CASES = [
    (1, "qwen2, tied"),
    pytest.param((2, "llama, biases, one kv head"), marks=pytest.mark.slow),
    (2, "moe, few tokens"),
]
"""Size and model of each engine; test_vllm_families.py has the layouts of all families, and test_vllm_refit.py updates."""

Started = tuple[Engine, list[Path]]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"tp{case[0]} {case[1]}")
def started(
    request: pytest.FixtureRequest, vllm_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    """An engine that loaded the first of three checkpoints of equal shape."""
    tp, name = request.param
    model_type, sizes = MODELS[name]
    root = tmp_path_factory.mktemp("models")
    checkpoints = [make_checkpoint(root / str(seed), model_type, seed=seed, **sizes) for seed in range(3)]
    with vllm_ranks.engine(make_config(checkpoints[0]), tp) as engine:
        yield engine, checkpoints


def check_against_hf(engine: Engine, checkpoint: Path, seed: int) -> None:
    rows = engine.run(requests([1, 2], PROMPTS, new=16, seed=seed))
    for row, prompt in zip(rows, PROMPTS, strict=True):
        expected = chosen(hf_logprobs(checkpoint, prompt, row.tokens), row.tokens)
        assert (torch.tensor(row.logprobs).double() - expected).abs().max() < 1e-5


def test_layout_is_vllms_and_updates_match_transformers(started: Started) -> None:
    """One test, because the order matters: loaded, updated in place, updated again."""
    engine, checkpoints = started
    state = state_of(checkpoints[0])
    held = engine.on_all(vllm_calls.tensors)
    for tensors, slices in zip(held, engine.on_all(vllm_calls.weight_slices), strict=True):
        for piece in expand(slices):
            part = tensors[piece.tensor][tuple(slice(*extent) for extent in piece.local)]
            whole = state[piece.name][tuple(slice(*extent) for extent in piece.box)]
            assert part.reshape(whole.shape).equal(whole), piece
            part.zero_()
        assert not any(tensor.any() for tensor in tensors.values()), "something is neither described nor padding"
    check_against_hf(engine, checkpoints[0], seed=10)

    addresses = engine.on_all(vllm_calls.memory_addresses)
    for version in (1, 2):
        engine.on_all(vllm_calls.write_weights, checkpoints[version], version)
        check_against_hf(engine, checkpoints[version], seed=10 + version)
    assert engine.on_all(vllm_calls.memory_addresses) == addresses  # a plan binds to them once
