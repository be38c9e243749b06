"""Experts of each token, which an engine records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dagrl.rl.routed_experts import MISSING
from tests.integration import vllm_calls
from tests.integration.vllm_models import make_checkpoint, make_config
from tests.integration.vllm_ranks import Ranks, requests


def test_recorded_experts_match_hugging_face(vllm_ranks: Ranks, tmp_path: Path) -> None:
    """Of prompts and completions, also where the prefix cache had the prompt; the last token is not computed."""
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3_moe", max_position_embeddings=128)
    generation = {"vllm_cfg": {"max_num_seqs": 8, "kv_cache_memory_bytes": 8 << 20}, "vllm_kwargs": {"block_size": 32}}
    config = make_config(checkpoint, generation, length=96)
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"router_replay": True})})
    prompt = [5 + number % 80 for number in range(70)]
    with vllm_ranks.engine(config, 1) as engine:
        first = engine.run(requests([1, 2], [prompt, prompt[:7]]))
        assert not len(engine.generate(requests([3], [[*prompt[:66], 9, 8, 7]], steps=1)))
        assert engine.on_all(vllm_calls.first_computed) == [64], "two blocks of the prompt are cached"
        second = engine.run(requests([], []))
    truth = hf_experts(checkpoint, [[*prompt, *first[0].tokens], [*prompt[:7], *first[1].tokens]])
    truth += hf_experts(checkpoint, [[*prompt[:66], 9, 8, 7, *second[0].tokens]])
    for row, chosen in zip([*first, *second], truth, strict=True):
        assert row.experts is not None
        found = row.experts.reshape(-1, 2, 2)  # tokens, layers, chosen
        np.testing.assert_array_equal(np.sort(found[:, 0], -1), np.sort(chosen[:-1], -1))
        assert (found[:, 1] == MISSING).all(), "the second layer is dense"


def hf_experts(checkpoint: Path, sequences: list[list[int]]) -> list[Any]:
    """Returns the experts [tokens, top k] that the first layer of transformers' model chooses."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found: list[Any] = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2].numpy()))
    with torch.no_grad():
        for sequence in sequences:
            model(torch.tensor([sequence]))
    return found
