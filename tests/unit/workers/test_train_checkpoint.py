"""Files of train workers: pieces of tensors at any division of them, scalar heads, and which models a checkpoint fits."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from safetensors.torch import save_file

from dagrl.config import Json, PolicyConfig
from dagrl.errors import CheckpointError
from dagrl.files import fingerprint
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families.hf_config import SCORE, with_scalar_head
from dagrl.workers.megatron.architecture import read_architecture, token_flops
from dagrl.workers.megatron.backend import MegatronBackend
from dagrl.workers.megatron.weights import megatron_weight_slices, parameter_shapes
from dagrl.workers.train.checkpoint import Piece, Saving, disk_error, load, range_boxes, save, whole
from dagrl.workers.train.hf_load import check_hf, has_scalar_head, load_hf
from dagrl.workers.train.identity import WORKER, identity_of, read_worker_file
from tests.families import FAMILIES
from tests.unit.run.saving import full_disk
from tests.unit.workers.test_hf_streaming import local_tensors
from tests.unit.workers.test_megatron_architecture import QWEN3 as LOADED

WEIGHT = torch.arange(60.0).view(6, 10)


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def rows(tensor: torch.Tensor, *sizes: int) -> list[Piece]:
    starts = np.cumsum([0, *sizes[:-1]])
    shape, parts = tuple(tensor.shape), tensor.split(list(sizes))
    return [Piece("w", part, (int(start), 0), shape) for start, part in zip(starts, parts, strict=True)]


@given(st.data())
def test_boxes_of_a_range_are_its_elements_in_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, numbers.size)] * 2)))
    boxes = list(range_boxes(shape, start, stop))
    parts = [numbers[tuple(slice(low, low + n) for low, n in zip(*box, strict=True))].ravel() for box in boxes]
    assert [number for part in parts for number in part.tolist()] == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


@pytest.mark.parametrize("background", [False, True])
def test_pieces_are_read_at_another_division(group: dist.ProcessGroup, tmp_path: Path, background: bool) -> None:
    saving = Saving(str(tmp_path), [*rows(WEIGHT, 1, 5), whole("random", torch.arange(9))], group, background=background)
    files = saving.finish(60)
    assert saving.is_written and {path.name for path in tmp_path.iterdir()} == {".metadata", *files}
    assert files == {name: fingerprint(tmp_path / name) for name in files} and len(files) == 2
    found, columns = torch.zeros(6, 10), torch.zeros(6, 3)
    load(tmp_path, [*rows(found, 4, 2)], group)
    assert torch.equal(found, WEIGHT)
    load(tmp_path, [Piece("w", columns, (0, 5), (6, 10))], group)
    assert torch.equal(columns, WEIGHT[:, 5:8])


def test_padding_is_loaded_as_zeros_and_cut(group: dist.ProcessGroup, tmp_path: Path) -> None:
    save(tmp_path, rows(WEIGHT, 6), group)
    more, less = torch.full((8, 10), 7.0), torch.empty(4, 10)
    load(tmp_path, [Piece("w", more, (0, 0), (8, 10), padded=True)], group)
    load(tmp_path, [Piece("w", less, (0, 0), (4, 10), padded=True)], group)
    assert torch.equal(more[:6], WEIGHT) and not more[6:].any() and torch.equal(less, WEIGHT[:4])


def test_missing_tensors_are_an_error_and_change_nothing(group: dist.ProcessGroup, tmp_path: Path) -> None:
    save(tmp_path, rows(WEIGHT, 6), group)
    mine = torch.full((8, 10), 7.0)
    with pytest.raises(CheckpointError, match=r"w has shape \(6, 10\) in it, expected \(8, 10\)"):
        load(tmp_path, rows(mine, 8), group)
    with pytest.raises(CheckpointError, match="it has no v"):
        load(tmp_path, [whole("v", mine)], group)
    assert (mine == 7).all()


def test_an_element_with_two_owners_is_not_saved(group: dist.ProcessGroup, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="w has overlapping chunks"):
        save(tmp_path, [*rows(WEIGHT, 1, 5), Piece("w", WEIGHT[:2], (2, 0), (6, 10))], group)


def test_a_full_disk_is_the_reason_of_a_failed_save(group: dist.ProcessGroup, tmp_path: Path) -> None:
    with full_disk(600), pytest.raises(CheckpointError, match="File too large"):
        Saving(str(tmp_path), [whole("w", torch.zeros(100_000))], group, background=False).finish(60)
    assert str(disk_error(ValueError("mine"))) == "mine"


MODEL: dict[str, Json] = FAMILIES["qwen3"]
CRITIC = with_scalar_head(MODEL)


def write(directory: Path, *, head: bool, of: dict[str, Json] = MODEL) -> dict[str, torch.Tensor]:
    """Writes a language model's checkpoint, with the head of one of `ForSequenceClassification`."""
    weights = {name: torch.randn(shape) for name, shape in parameter_shapes(of).items()}
    if head:
        weights[SCORE] = torch.randn(1, 32)
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
    save_file({**weights, SCORE: torch.randn(2, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'score.weight' has shape \[2, 32\], expected \[1, 32\]"):
        check_hf(tmp_path, parameter_shapes(CRITIC))


def test_a_critic_computes_no_logits() -> None:
    critic, policy = read_architecture(CRITIC), read_architecture(MODEL)
    assert critic.scalar and not critic.tied and policy.tied
    assert token_flops(policy) - token_flops(critic) == 2 * 32 * (300 - 1)
    assert critic.computed != policy.computed


QWEN3: dict[str, Any] = {**LOADED, "rope_theta": 1000000, "rope_scaling": None, "eos_token_id": 3}
QWEN3 |= {"transformers_version": "4.51.0", "torch_dtype": "float32"}
ROPE = {"rope_theta": 1e6, "rope_type": "default"}
UPGRADED = {**LOADED, "rope_parameters": ROPE, "eos_token_id": 3, "dtype": "float32", "transformers_version": "5.0.0"}
UPGRADED |= {"layer_types": ["full_attention"] * 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": 128}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
SCALED = {**QWEN3, "rope_scaling": {"type": "llama3", **LLAMA3}}
RESCALED = {**UPGRADED, "rope_parameters": {**ROPE, "rope_type": "llama3", **LLAMA3}}
MOE = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FORMAT = MegatronBackend.checkpoint_format


def read(directory: Path, model: dict[str, Any]) -> dict[str, Any]:
    identity = identity_of(PolicyConfig(precision="float32"), model)
    return read_worker_file(directory, FORMAT, identity, MegatronBackend.computed)


def write_identity(directory: Path, content: object) -> None:
    (directory / WORKER).write_text(json.dumps(content))


def of(model: dict[str, Any], precision: Literal["float32", "bfloat16"] = "float32") -> dict[str, Any]:
    return {"format": FORMAT, "identity": identity_of(PolicyConfig(precision=precision), model), "reference": False}


@pytest.mark.parametrize(
    ("saved", "mine", "message"),
    [
        (QWEN3, {**QWEN3, "eos_token_id": [3, 5], "pad_token_id": 0, "max_position_embeddings": 99}, ""),
        (QWEN3, UPGRADED, ""),
        (UPGRADED, QWEN3, ""),
        (SCALED, RESCALED, ""),
        (MOE, {**MOE, "norm_topk_prob": False, "decoder_sparse_step": 1, "router_aux_loss_coef": 0.5}, ""),
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
def test_a_model_loads_however_it_is_written(
    tmp_path: Path, saved: dict[str, Any], mine: dict[str, Any], message: str
) -> None:
    """Another one is rejected with the keys that differ."""
    write_identity(tmp_path, of(saved))
    if message:
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path, mine)
    else:
        assert read(tmp_path, mine) == of(saved)


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
