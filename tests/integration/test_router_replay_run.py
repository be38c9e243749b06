"""Router replay from the command: GRPO in bfloat16 with real engines, whose experts the train workers use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.main_job import GRPO, SMALL, train

MODEL = (
    "{architectures: [Qwen3MoeForCausalLM], model_type: qwen3_moe, hidden_size: 64, intermediate_size: 128, "
    "moe_intermediate_size: 64, num_experts: 16, num_experts_per_tok: 2, norm_topk_prob: true, num_hidden_layers: 4, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 32, max_position_embeddings: 64, rope_theta: 10000.0, "
    "tie_word_embeddings: false, initializer_range: 0.05}"
)


def runs_without_and_with_replay(directory: Path, *options: str) -> tuple[dict[bool, float], list[dict[str, Any]]]:
    """Trains twice. Returns the mean `gen_kl_error` without and with replay, and the steps of the run with it."""
    error = {}
    for replay in (False, True):
        run = train(GRPO, directory, f"replay_{replay}", *SMALL, *options, f"policy.router_replay={str(replay).lower()}")
        steps = [row for row in run.metrics if "gen_kl_error" in row]
        assert len(steps) == 6
        error[replay] = float(np.mean([row["gen_kl_error"] for row in steps]))
    assert all(row["moe/replayed_tokens"] > 0.7 for row in steps)  # all but the last of each short sequence
    return error, steps


@pytest.mark.slow
def test_generation_and_training_are_closer_with_the_same_experts(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    options = ("policy.precision=bfloat16", f"policy.random_init.hf_config={MODEL}")
    error, steps = runs_without_and_with_replay(tmp_path, *options)
    assert all(0.9 < row["moe/replayed_agreement"] < 1 for row in steps)
    assert error[True] < 0.7 * error[False]
