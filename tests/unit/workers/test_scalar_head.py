"""A scalar head in a checkpoint: read if it is there, left for a fresh one if not, on the last pipeline stage alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dagrl.config import Json
from dagrl.errors import CheckpointError
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families.hf_config import SCORE, with_scalar_head
from dagrl.workers.megatron.architecture import read_architecture, token_flops
from dagrl.workers.megatron.weights import megatron_weight_slices, parameter_shapes
from dagrl.workers.train.hf_load import check_hf, has_scalar_head, load_hf
from tests.unit.workers.test_hf_streaming import local_tensors

MODEL: dict[str, Json] = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 20,
    "tie_word_embeddings": True,
}
CRITIC = with_scalar_head(MODEL)


def write(directory: Path, *, head: bool, of: dict[str, Json] = MODEL) -> dict[str, torch.Tensor]:
    """Writes a language model's checkpoint, with the head of one of `ForSequenceClassification`."""
    weights = {name: torch.randn(shape) for name, shape in parameter_shapes(of).items()}
    if head:
        weights[SCORE] = torch.randn(1, 16)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(of))
    return weights


def loaded(directory: Path, rank: int) -> dict[str, torch.Tensor]:
    layout = ParallelLayout(tp=2, pp=2)
    slices = megatron_weight_slices(CRITIC, layout, rank)
    tensors = local_tensors(slices)
    load_hf(directory, slices, parameter_shapes(CRITIC), tensors)
    return tensors


def test_the_head_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    weights = write(tmp_path, head=True)
    check_hf(tmp_path, parameter_shapes(CRITIC))
    assert has_scalar_head(tmp_path)
    for rank in range(4):
        tensors = loaded(tmp_path, rank)
        assert ("output_layer.weight" in tensors) == (rank >= 2)  # the last stage, whole on each of its workers
        if rank >= 2:
            torch.testing.assert_close(tensors["output_layer.weight"], weights[SCORE], atol=0, rtol=0)


def test_a_language_model_has_no_scalar_head(tmp_path: Path) -> None:
    write(tmp_path, head=False)
    check_hf(tmp_path, parameter_shapes(CRITIC))
    assert not has_scalar_head(tmp_path)
    assert not loaded(tmp_path, 3)["output_layer.weight"].any()


def test_another_head_is_an_error(tmp_path: Path) -> None:
    weights = write(tmp_path, head=True)
    with pytest.raises(CheckpointError, match=r"'score\.weight'"):
        check_hf(tmp_path, parameter_shapes(MODEL))  # a policy is not read from a critic
    save_file({**weights, SCORE: torch.randn(2, 16)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'score.weight' has shape \[2, 16\], expected \[1, 16\]"):
        check_hf(tmp_path, parameter_shapes(CRITIC))


def test_a_critic_computes_no_logits() -> None:
    critic, policy = read_architecture(CRITIC), read_architecture(MODEL)
    assert critic.scalar and not critic.tied and policy.tied
    assert token_flops(policy) - token_flops(critic) == 2 * 16 * (20 - 1)
    assert critic.computed != policy.computed
