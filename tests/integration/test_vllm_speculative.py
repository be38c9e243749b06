"""Speculative decoding in quanta and across weight updates, against Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import vllm_calls
from tests.integration.vllm_models import SIZES, chosen, hf_logprobs, make_checkpoint, make_config
from tests.integration.vllm_ranks import SOCKETS, Engine, Ranks, call, requests

PROMPTS = [[3 + (first + token) % 97 for token in range(97)] for first in (0, 20, 50)]
"""With every token, so there is always an n-gram of one."""

DRAFTS = 3
NEW = 48

pytestmark = pytest.mark.slow


def make_drafter(directory: Path) -> Path:
    """Saves a random EAGLE drafter of one layer, which shares the policy's embedding and head."""
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 1})).save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    layer = {name.removeprefix("model."): weight for name, weight in weights.items() if name.startswith("model.layers.")}
    del layer["layers.0.input_layernorm.weight"]
    hidden = int(SIZES["hidden_size"])
    save_file({**layer, "fc.weight": torch.randn(hidden, 2 * hidden) * 0.1}, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_checkpoint(root / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture(scope="module", params=["ngram", "eagle"])
def engine(
    request: pytest.FixtureRequest, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine in processes of its own: vLLM starts no other one on a CPU where numba, which n-grams need, is loaded."""
    pytest.importorskip("vllm")
    from dagrl.workers.vllm import VllmWorker

    own: dict[str, Any] = {"prompt_lookup_min": 1}
    if request.param == "eagle":
        own = {"model": str(make_drafter(tmp_path_factory.mktemp("eagle")))}
    drafter = {"method": request.param, "num_speculative_tokens": DRAFTS, **own}
    vllm = {"max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20}
    kwargs = {"speculative_config": drafter}
    options = {"vllm_cfg": vllm, "vllm_kwargs": kwargs, "forced_lengths": {"median": NEW, "sigma": 0}}  # no end of sequence
    config = make_config(checkpoints[0], options, length=192)
    recomputing = config.grpo.async_grpo.model_copy(update={"recompute_kv_cache_after_weight_updates": True})
    config = config.model_copy(update={"grpo": config.grpo.model_copy(update={"async_grpo": recomputing})})
    ranks = Ranks({**VllmWorker.environment(config), SOCKETS: str(tmp_path_factory.mktemp("sockets"))})
    try:
        with ranks.engine(config, 1) as engine:
            yield engine
    finally:
        ranks.close()


def test_greedy_tokens_are_the_likeliest_and_steps_make_several(engine: Engine, checkpoints: list[Path]) -> None:
    engine.on_all(vllm_calls.write_weights, checkpoints[0], 0)
    made = engine.generate(requests([1, 2, 3], PROMPTS, new=NEW, steps=NEW, greedy=True))
    assert len(made) == 3
    if engine.on_all(vllm_calls.drafter) == ["ngram"]:  # a random EAGLE drafter may never be right
        alone = [engine.generate(requests([4], [prompt], new=NEW, steps=NEW, greedy=True)) for prompt in PROMPTS]
        assert min(one.engine_steps for one in alone) < NEW  # drafts were accepted, if a text repeats itself
    for row, prompt in zip(map(made.request, range(3)), PROMPTS, strict=True):
        expected = hf_logprobs(checkpoints[0], prompt, row.tokens)
        assert row.tokens == expected.argmax(-1).tolist()
        assert (torch.tensor(row.logprobs).double() - chosen(expected, row.tokens)).abs().max() < 1e-5


def test_sampled_tokens_have_the_version_and_logprobs_of_the_weights_that_made_them(
    engine: Engine, checkpoints: list[Path]
) -> None:
    """The update comes while drafts of the first weights wait to be verified. Running requests are prefilled again."""
    engine.on_all(vllm_calls.write_weights, checkpoints[0], 0)
    assert len(engine.generate(requests([11, 12, 13], PROMPTS, new=NEW, steps=6))) == 0
    assert engine.on_all(vllm_calls.waiting_drafts)[0] > 0
    engine.on_all(vllm_calls.write_weights, checkpoints[1], 1)
    for row, prompt in zip(engine.run(requests([], [])), PROMPTS, strict=True):
        old = row.versions.count(0)
        assert 6 <= old < 6 * (1 + DRAFTS) and row.versions == [0] * old + [1] * (NEW - old)
        for checkpoint, part in ((checkpoints[0], slice(0, old)), (checkpoints[1], slice(old, None))):
            expected = chosen(hf_logprobs(checkpoint, prompt, row.tokens), row.tokens)
            assert (torch.tensor(row.logprobs).double() - expected)[part].abs().max() < 1e-5


def test_an_aborted_request_leaves_no_draft(engine: Engine) -> None:
    engine.generate(requests([21, 22], PROMPTS[:2], new=40, steps=3))
    assert engine.on_all(call, "abort_requests", [21]) == [1]
    assert [row.request_id for row in engine.run(requests([23], PROMPTS[2:]))] == [22, 23]
