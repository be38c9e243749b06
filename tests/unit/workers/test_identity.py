"""Models of train checkpoints: equal ones load however `config.json` expresses them; errors name differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from dagrl.config import PolicyConfig
from dagrl.errors import CheckpointError
from dagrl.workers.megatron.backend import MegatronBackend
from dagrl.workers.train.identity import WORKER, identity_of, read_worker_file
from tests.unit.workers.test_megatron_architecture import QWEN3 as MODEL

QWEN3: dict[str, Any] = {
    **MODEL,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "eos_token_id": 3,
    "transformers_version": "4.51.0",
    "torch_dtype": "float32",
}
UPGRADED = {key: value for key, value in QWEN3.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
UPGRADED |= {
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "dtype": "float32",
    "transformers_version": "5.0.0",
    "layer_types": ["full_attention"] * 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "head_dim": 128,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
SCALED = {**QWEN3, "rope_scaling": {"type": "llama3", **LLAMA3}}
RESCALED = {**UPGRADED, "rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3", **LLAMA3}}
MOE = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


FORMAT = MegatronBackend.checkpoint_format


def read(directory: Path, model: dict[str, Any]) -> dict[str, Any]:
    identity = identity_of(PolicyConfig(precision="float32"), model)
    return read_worker_file(directory, FORMAT, identity, MegatronBackend.computed)


def write(directory: Path, content: object) -> None:
    (directory / WORKER).write_text(json.dumps(content))


def of(model: dict[str, Any], precision: Literal["float32", "bfloat16"] = "float32") -> dict[str, Any]:
    return {"format": FORMAT, "identity": identity_of(PolicyConfig(precision=precision), model), "reference": False}


@pytest.mark.parametrize(
    ("saved", "mine"),
    [
        (QWEN3, {**QWEN3, "eos_token_id": [3, 5], "pad_token_id": 0, "max_position_embeddings": 99}),
        (QWEN3, UPGRADED),
        (UPGRADED, QWEN3),
        (SCALED, RESCALED),
        (MOE, {**MOE, "norm_topk_prob": False, "decoder_sparse_step": 1, "router_aux_loss_coef": 0.5}),
    ],
    ids=["edited", "upgraded", "downgraded", "scaled", "experts"],
)
def test_equal_models_load_however_they_are_written(tmp_path: Path, saved: dict[str, Any], mine: dict[str, Any]) -> None:
    write(tmp_path, of(saved))
    assert read(tmp_path, mine) == of(saved)


@pytest.mark.parametrize(
    ("saved", "mine", "message"),
    [
        (QWEN3, {**QWEN3, "rope_theta": 1e4}, r"model rope_theta = 1000000\.0 \(this run: 10000\.0\);"),
        (QWEN3, {**QWEN3, "head_dim": 32}, r"model head_dim = 128 \(this run: 32\), rotary_dim"),
        (QWEN3, {**QWEN3, "rms_norm_eps": 1e-5}, r"model norm_eps = 1e-06 \(this run: 1e-05\);"),
        (QWEN3, {**QWEN3, "model_type": "qwen2", "head_dim": 128}, r"model model_type = qwen3 \(this run: qwen2\)"),
        (QWEN3, SCALED, r"model rope_type = default \(this run: llama3\), factor = None \(this run: 8\.0\)"),
        (SCALED, {**SCALED, "rope_scaling": {"type": "llama3", **LLAMA3, "factor": 4}}, r"model factor = 8\.0 .*: 4\.0\);"),
        (MOE, {**MOE, "norm_topk_prob": True}, r"model normalize_expert_weights = False \(this run: True\);"),
        (MOE, {**MOE, "mlp_only_layers": [1]}, r"moe_layers = .* \(this run: \[True, False, True, True\]\);"),
        ({**QWEN3, "model_type": "gpt2"}, QWEN3, "a model that this version does not train: model_type is 'gpt2'"),
    ],
)
def test_another_model_is_rejected_with_the_differing_keys(
    tmp_path: Path, saved: dict[str, Any], mine: dict[str, Any], message: str
) -> None:
    write(tmp_path, of(saved))
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, mine)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(of(QWEN3, "bfloat16")), "written with precision bfloat16, this run has float32"),
        (json.dumps([of(QWEN3)]), rf"worker\.json has format 'list', expected '{FORMAT}'"),
        ("{}", rf"worker\.json has format None, expected '{FORMAT}'"),
        ("\xff{", r"cannot read .*worker\.json.*written by save_checkpoint"),
    ],
)
def test_other_files_are_rejected_with_what_was_found(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / WORKER).write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, QWEN3)
