"""Speculative decoding on a GPU, under CUDA graphs and across a weight update, against transformers in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dagrl.config import Config
from dagrl.rl.generation import FinishedRequest
from tests.gpu.test_vllm_worker import CLOSE, Engine, difference, gpu_config, started
from tests.integration import vllm_calls
from tests.integration.test_vllm_speculative import DRAFTS, NEW, PROMPTS, make_drafter
from tests.integration.vllm_models import make_checkpoint
from tests.integration.vllm_ranks import requests

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module", params=["ngram", "eagle"])
def engine(request: pytest.FixtureRequest, cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("models")
    checkpoints = [make_checkpoint(root / str(seed), seed=seed) for seed in range(2)]
    own: dict[str, Any] = {"prompt_lookup_min": 1}
    if request.param == "eagle":
        own = {"model": str(make_drafter(root / "eagle"))}
    content: dict[str, Any] = gpu_config(checkpoints[0], eager=False).model_dump()
    content["grpo"]["async_grpo"]["recompute_kv_cache_after_weight_updates"] = True
    content["policy"]["generation"]["forced_lengths"] = {"median": NEW, "sigma": 0}  # no end of sequence
    drafter = {"method": request.param, "num_speculative_tokens": DRAFTS, **own}
    content["policy"]["generation"]["vllm_kwargs"] = {"speculative_config": drafter}
    with started(checkpoints, Config.model_validate(content)) as engine:
        yield engine


def test_tokens_have_the_logprobs_of_the_policy(engine: Engine) -> None:
    engine.write(0, 0)
    made = engine.quantum(requests([1, 2, 3], PROMPTS, new=NEW, steps=NEW, greedy=True))
    if engine.group.call_function(vllm_calls.drafter) == ["ngram"]:  # a random EAGLE drafter may never be right
        alone = [requests([number], [prompt], new=NEW, steps=NEW, greedy=True) for number, prompt in enumerate(PROMPTS, 21)]
        assert min(engine.quantum(one).engine_steps for one in alone) < NEW  # some drafts were accepted
    engine.check(0, [made.request(row) for row in range(3)], PROMPTS)
    engine.check(0, engine.run(requests([4, 5, 6], PROMPTS, new=NEW)), PROMPTS)


def test_tokens_have_the_version_and_logprobs_of_the_weights_that_made_them(engine: Engine) -> None:
    """The update comes while drafts of the first weights wait to be verified. Running requests are prefilled again."""
    engine.write(0, 0)
    assert len(engine.quantum(requests([11, 12, 13], PROMPTS, new=NEW, steps=6))) == 0
    assert engine.group.call_function(vllm_calls.waiting_drafts)[0] > 0
    engine.write(1, 1)
    for row, prompt in zip(engine.run(requests([], [])), PROMPTS, strict=True):
        old = list(row.versions).count(0)
        assert 6 <= old < 6 * (1 + DRAFTS) and row.versions == [0] * old + [1] * (NEW - old)
        tokens, logprobs = list(row.tokens), list(row.logprobs)
        engine.check(0, [FinishedRequest(row.request_id, tokens[:old], logprobs[:old], row.versions[:old], "")], [prompt])
        rest = FinishedRequest(row.request_id, tokens[old:], logprobs[old:], row.versions[old:], "")
        engine.check(1, [rest], [prompt + tokens[:old]])
        assert difference(engine.checkpoints[0], [rest], [prompt + tokens[:old]]) > 4 * CLOSE
