"""vLLM's weight layout: all ranks together hold the model, without overlap."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.errors import ConfigError, LayoutError
from dagrl.refit.slices import WeightSlice, expand
from dagrl.workers.vllm.features import local_name
from dagrl.workers.vllm.weights import VllmRank, vllm_weight_slices
from tests.unit.refit.weight_reference import (
    equal,
    filled,
    hf_weights,
    model_configs,
    vllm_sizes,
    vllm_tensors,
)

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MOE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}


def transformers_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the model that transformers builds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def described(slices: list[WeightSlice]) -> dict[str, tuple[int, ...]]:
    stops: dict[str, tuple[int, ...]] = {}
    for piece in slices:
        extent = tuple(stop for _, stop in piece.box)
        stops[piece.name] = tuple(map(max, extent, stops.get(piece.name, extent)))
    return stops


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "config",
    [
        DENSE,
        {**DENSE, "tie_word_embeddings": True},
        {**DENSE, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {**DENSE, "model_type": "llama", "num_key_value_heads": 4, "head_dim": None},
        {**DENSE, "model_type": "qwen2", "hidden_size": 32},
    ],
    ids=["qwen3", "qwen3 tied", "llama with biases", "llama", "qwen2"],
)
def test_the_ranks_together_hold_the_model_of_transformers(config: dict[str, Any], tp: int) -> None:
    shapes = transformers_shapes({key: value for key, value in config.items() if value is not None})
    ranks = [list(expand(vllm_weight_slices(config, VllmRank(tp, rank)))) for rank in range(tp)]
    assert described([piece for rank in ranks for piece in rank]) == shapes
    holders = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for piece in (piece for rank in ranks for piece in rank):
        holders[piece.name][tuple(slice(*extent) for extent in piece.box)] += 1
    for name, count in holders.items():
        assert count.min() == count.max(), f"{name}: some elements are held by more ranks than others"
        assert count.min() == expected_holders(name, config, tp), name


def expected_holders(name: str, config: dict[str, Any], tp: int) -> int:
    if "k_proj" in name or "v_proj" in name:
        return max(1, tp // config["num_key_value_heads"])
    divided = ("q_proj", "o_proj.weight", "gate_proj", "up_proj", "down_proj.weight", "embed_tokens", "lm_head")
    return 1 if any(part in name for part in divided) else tp


@settings(deadline=None, max_examples=60)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    heads=st.sampled_from([1, 2, 4]),
    keys=st.sampled_from([1, 2, 4, 8]),
    vocabulary=st.integers(1, 300),
    moe=st.booleans(),
)
def test_local_boxes_fill_the_tensors_once(tp: int, heads: int, keys: int, vocabulary: int, moe: bool) -> None:
    """Slices fill every local tensor without gap or overlap, except vocabulary padding."""
    attention = {"num_attention_heads": heads * max(keys, tp), "num_key_value_heads": keys, "vocab_size": vocabulary}
    config = {**(MOE if moe else DENSE), **attention, "tie_word_embeddings": False}
    for rank in range(tp):
        boxes = defaultdict(list)
        for piece in vllm_weight_slices(config, VllmRank(tp, rank)):
            boxes[piece.tensor].append(piece.local)
        for tensor, parts in boxes.items():
            filled = np.zeros([max(part[axis][1] for part in parts) for axis in range(len(parts[0]))], int)
            for part in parts:
                filled[tuple(slice(*extent) for extent in part)] += 1
            assert (filled == 1).all(), tensor


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_slices_rebuild_what_vllm_holds(data: st.DataObject) -> None:
    config = data.draw(model_configs())
    tp, ep = data.draw(st.sampled_from(vllm_sizes(config))), data.draw(st.booleans())
    weights = hf_weights(config)
    for rank in range(tp):
        expected = vllm_tensors(weights, config, tp, rank, ep)
        slices = vllm_weight_slices(config, VllmRank(tp, rank, expert_parallel=ep))
        assert equal(filled(weights, slices, expected), expected)


def test_experts_are_in_the_fused_tensors() -> None:
    slices = vllm_weight_slices({**MOE, "mlp_only_layers": [0]}, VllmRank(2, 1))
    pieces = {piece.name: piece for piece in expand(slices)}
    up, down = (pieces[f"model.layers.1.mlp.experts.3.{name}_proj.weight"] for name in ("up", "down"))
    assert up == WeightSlice(up.name, ((4, 8), (0, 16)), "model.layers.1.mlp.experts.w13_weight", ((3, 4), (4, 8), (0, 16)))
    assert (down.box, down.local) == (((0, 16), (4, 8)), ((3, 4), (0, 16), (0, 4)))
    assert pieces["model.layers.1.mlp.gate.weight"].box == ((0, 4), (0, 16))
    assert "model.layers.0.mlp.gate_proj.weight" in pieces
    assert local_name("model.layers.1.mlp.experts.routed_experts.w13_weight") == up.tensor


@pytest.mark.parametrize(
    ("change", "tp", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, 4, r"attention heads \(6\)"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, r"key/value heads \(6\)"),
        ({"num_attention_heads": 12, "vocab_size": 192}, 3, "2 key/value heads"),
        ({"intermediate_size": 26}, 4, r"intermediate size \(26\)"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, 3, "padded vocabulary"),
    ],
)
def test_sizes_that_do_not_divide_name_rank_and_parameter(change: dict[str, Any], tp: int, message: str) -> None:
    with pytest.raises(LayoutError, match=rf"^generation rank 1, \S+\.weight: .*{message}"):
        vllm_weight_slices({**DENSE, **change}, VllmRank(tp, 1))


def test_an_unknown_model_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'gpt2'"):
        vllm_weight_slices({"model_type": "gpt2"}, VllmRank(1, 0))
