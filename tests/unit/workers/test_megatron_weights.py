"""Megatron's weight layout against torch slicing, and against real Megatron-Core modules."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from dagrl.errors import ConfigError, LayoutError
from dagrl.refit.slices import expand, volume
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron.weights import megatron_weight_slices
from tests.families import FAMILIES, random_model
from tests.unit.refit.weight_reference import (
    Config,
    equal,
    filled,
    hf_weights,
    megatron_layouts,
    megatron_tensors,
    model_config,
    model_configs,
)

OPTIONAL = "num_key_value_heads", "head_dim", "q_lora_rank", "n_shared_experts", "first_k_dense_replace"
"""Keys whose defaults differ between families."""


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_slices_rebuild_what_megatron_holds(data: st.DataObject) -> None:
    config = data.draw(model_configs())
    layout = data.draw(megatron_layouts(config, limit=16))
    weights = hf_weights(config)
    for rank in range(layout.world_size):
        expected = megatron_tensors(weights, config, layout, rank)
        slices = megatron_weight_slices(config, layout, rank)
        assert equal(filled(weights, slices, expected), expected)  # padding rows, which no slice names, are 0 in both


def test_a_rank_with_only_padding_has_no_embedding() -> None:
    config = model_config(vocab_size=100)
    names = [{held.name for held in megatron_weight_slices(config, ParallelLayout(tp=2), rank)} for rank in range(2)]
    assert "model.embed_tokens.weight" in names[0] and "model.embed_tokens.weight" not in names[1]


@pytest.mark.parametrize(
    ("changes", "layout", "words"),
    [
        ({"num_key_value_heads": 3, "num_attention_heads": 6}, ParallelLayout(tp=2), r"k_proj\.weight: 3 key-value heads"),
        ({"num_attention_heads": 6}, ParallelLayout(tp=4), r"q_proj\.weight: the attention heads \(6\)"),
        ({}, ParallelLayout(pp=3), "layers"),
        ({"intermediate_size": 18}, ParallelLayout(tp=4), r"gate_proj\.weight: .*intermediate_size"),
        ({"model_type": "qwen3_moe", **model_config("qwen3_moe")}, ParallelLayout(dp=3, ep=3), r"gate_proj.*: the experts"),
        ({"num_key_value_heads": 1, "head_dim": 3}, ParallelLayout(tp=4), r"q_proj\.weight: the rows of query, key and"),
    ],
)
def test_a_layout_that_does_not_fit_names_rank_parameter_and_cause(
    changes: dict[str, object], layout: ParallelLayout, words: str
) -> None:
    with pytest.raises(LayoutError, match=rf"^train rank 0 \(dp 0, pp 0, .*{words}"):
        megatron_weight_slices(model_config(**changes), layout, 0)  # type: ignore[arg-type]


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(ConfigError, match="mamba"):
        megatron_weight_slices(model_config("mamba"), ParallelLayout(), 0)


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, config in FAMILIES.items() for key in OPTIONAL if key in config]
)
def test_missing_keys_are_as_in_transformers(kind: str, key: str, tmp_path: Path) -> None:
    """The parameters of a checkpoint written by transformers, and their elements."""
    model = {**FAMILIES[kind], "num_attention_heads": 32, "num_key_value_heads": 2}
    config = {name: value for name, value in model.items() if name != key}
    _, written = random_model(config, tmp_path)
    sizes = {name: tensor.numel() for name, tensor in written.items()}
    held: Counter[str] = Counter()
    for piece in expand(megatron_weight_slices(config, ParallelLayout(), 0)):
        held[piece.name] += volume(piece.box)
    assert held == sizes


REAL_CASES: list[tuple[Config, ParallelLayout]] = [
    (model_config("qwen3", tie_word_embeddings=True), ParallelLayout(tp=2, pp=2)),
    (model_config("qwen3"), ParallelLayout(tp=4, dp=2)),  # fewer key-value heads than ranks
    (model_config("qwen2", tie_word_embeddings=True), ParallelLayout(tp=2)),
    (model_config("llama"), ParallelLayout(pp=2, vpp=2)),
    (model_config("llama", num_hidden_layers=6), ParallelLayout(pp=3, cp=2, first_stage_layers=1, last_stage_layers=3)),
    (model_config("llama", num_hidden_layers=8), ParallelLayout(pp=2, vpp=2, first_stage_layers=2)),
    (model_config("qwen3_moe", tie_word_embeddings=True), ParallelLayout(tp=2, dp=2, ep=2, etp=1)),
    (model_config("qwen3_moe"), ParallelLayout(tp=2, dp=2, ep=2)),
    (model_config("mixtral"), ParallelLayout(tp=2, dp=2, ep=4, etp=1)),
    (model_config("glm4_moe"), ParallelLayout(tp=2, pp=2, ep=2, etp=1)),
    (model_config("deepseek_v3"), ParallelLayout(tp=2, pp=2, ep=2, etp=1, first_stage_layers=1)),
    (model_config("qwen3_moe"), ParallelLayout(tp=2, dp=4, ep=2)),  # experts cut twice, with replicas
    (model_config("deepseek_v3"), ParallelLayout(dp=4, ep=2, etp=2)),  # experts cut where attention is not
    (model_config("deepseek_v3"), ParallelLayout(tp=2, pp=2, vpp=2, cp=2, ep=2, etp=1)),
    (model_config("deepseek_v3", q_lora_rank=None, n_shared_experts=None), ParallelLayout(tp=2)),
]
