"""What `dagrl inspect` says of an engine before it runs equals the reference: plain, expert-parallel, in blockwise FP8."""

from __future__ import annotations

import pytest

from dagrl.errors import ConfigError
from dagrl.workers.vllm.described import describe_ranks
from dagrl.workers.vllm.quantization import block_fp8
from tests.families import FAMILIES
from tests.integration.vllm_boxes import boxes
from tests.unit.refit.weight_reference import VllmRank, vllm_weight_slices


def test_the_description_of_an_engine_is_its_layout() -> None:
    pytest.importorskip("vllm")
    config = {**FAMILIES["mixtral"], "hidden_size": 128, "intermediate_size": 512, "head_dim": 128, "num_attention_heads": 4}
    quantized = {"quantization_config": block_fp8(config["num_hidden_layers"])}
    arguments = {"dtype": "bfloat16", "enable_expert_parallel": True, "hf_overrides": quantized}
    ranks = describe_ranks(config, 2, arguments)
    assert [boxes(one, "bfloat16") for one in ranks] == [
        boxes(vllm_weight_slices(config, VllmRank(2, rank, expert_parallel=True, fp8=True)), "bfloat16") for rank in range(2)
    ]


def test_a_model_without_rules_of_ours_is_described() -> None:
    pytest.importorskip("vllm")
    config = {**FAMILIES["llama"], "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    (one,) = describe_ranks(config, 1, {"dtype": "bfloat16"})
    assert {slices.name for slices in one} >= {
        "model.embed_tokens.weight",
        "model.layers.0.post_feedforward_layernorm.weight",
    }


def test_a_model_that_vllm_cannot_divide_is_an_error() -> None:
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match="no refit plan before an engine runs"):
        describe_ranks({**FAMILIES["llama"], "intermediate_size": 30}, 4, {"dtype": "bfloat16"})
