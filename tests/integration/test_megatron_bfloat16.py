"""Training in bfloat16 is close to float32, by bounds that a model without attention violates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import MegatronPool
from tests.integration.test_megatron_layouts import UNCLIPPED, Case, case, run_case

CASES = [
    case("qwen3", "single"),
    case("qwen3", "dp2-sharded", sharded=True, dp=2),
    case("qwen3_tied", "tp2", tp=2),
    case("qwen3_moe", "dp2ep2", dp=2, ep=2),
]


@pytest.fixture(scope="module")
def truth(tiny_models: dict[str, Path]) -> dict[str, reference.Run]:
    """Results of Hugging Face and plain torch in float32."""
    return {name: plain_torch(tiny_models[name]) for name in {item.model for item in CASES}}


def plain_torch(model: Path) -> reference.Run:
    config = reference.make_config(model, optimizer=UNCLIPPED)
    return reference.train_reference(model, reference.make_batch(), config, reference.sft_reference)


@pytest.mark.parametrize("item", CASES, ids=lambda item: item.name)
def test_bfloat16_is_close_to_float32(
    item: Case, megatron_pool: MegatronPool, tiny_models: dict[str, Path], truth: dict[str, reference.Run]
) -> None:
    found = run_case(megatron_pool, item, tiny_models[item.model], precision="bfloat16")
    assert not reference.beyond_bfloat16(found, truth[item.model])


@pytest.mark.parametrize("name", sorted({item.model for item in CASES}))
def test_every_comparison_detects_missing_attention(
    name: str, tiny_models: dict[str, Path], truth: dict[str, reference.Run], tmp_path: Path
) -> None:
    """Zeroes attention's output. Every check except the losses detects it on its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_models[name], dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    model.save_pretrained(tmp_path)
    told = reference.beyond_bfloat16(plain_torch(tmp_path), truth[name])
    assert {"logprobs", "gradients", "first loss"} <= set(told)
