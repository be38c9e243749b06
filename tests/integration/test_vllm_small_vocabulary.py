"""A vocabulary so small that a rank's share of it is padding alone: the engine starts, and generates as Hugging Face."""

from __future__ import annotations

from pathlib import Path

import torch

from dagrl.refit.slices import expand
from tests.integration import vllm_calls
from tests.integration.vllm_models import chosen, hf_logprobs, make_checkpoint, make_config
from tests.integration.vllm_ranks import Ranks, requests

PROMPT = [3, 7, 12, 5]


def test_a_rank_without_a_token_of_its_own(vllm_ranks: Ranks, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", vocab_size=15)
    two = {"vllm_cfg": {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 8}}
    with vllm_ranks.engine(make_config(checkpoint, two), 2) as engine:
        slices = engine.on_all(vllm_calls.weight_slices)
        held = [{piece.name for piece in expand(described)} for described in slices]
        assert "lm_head.weight" in held[0] and "lm_head.weight" not in held[1]
        (made,) = engine.run(requests([1], [PROMPT], new=6))
    expected = chosen(hf_logprobs(checkpoint, PROMPT, made.tokens), made.tokens)
    torch.testing.assert_close(torch.tensor(made.logprobs).double(), expected, atol=1e-4, rtol=0)
