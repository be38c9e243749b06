"""Files of train workers: tensors at any division, scalar heads, which models a checkpoint fits, and Hugging Face's."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from dagrl.config import Json, PolicyConfig
from dagrl.errors import CheckpointError
from dagrl.files import fingerprint
from dagrl.refit.slices import WeightSlice, expand
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families.hf_config import SCORE, with_scalar_head
from dagrl.workers.megatron.architecture import read_architecture, token_flops
from dagrl.workers.megatron.backend import MegatronBackend
from dagrl.workers.megatron.weights import megatron_weight_slices, parameter_shapes
from dagrl.workers.train import hf_export, hf_load
from dagrl.workers.train.checkpoint import Piece, Saving, disk_error, load, range_boxes, save, whole
from dagrl.workers.train.hf_load import check_hf, has_scalar_head, load_hf
from dagrl.workers.train.identity import WORKER, identity_of, read_worker_file
from tests.families import FAMILIES
from tests.unit.run.test_checkpoints import full_disk
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


SMALL: dict[str, Json] = FAMILIES["qwen3"]
CRITIC = with_scalar_head(SMALL)


def write(directory: Path, *, head: bool, of: dict[str, Json] = SMALL) -> dict[str, torch.Tensor]:
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
        check_hf(tmp_path, parameter_shapes(SMALL))  # a policy is not read from a critic
    save_file({**weights, SCORE: torch.randn(2, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'score.weight' has shape \[2, 32\], expected \[1, 32\]"):
        check_hf(tmp_path, parameter_shapes(CRITIC))


def test_a_critic_computes_no_logits() -> None:
    critic, policy = read_architecture(CRITIC), read_architecture(SMALL)
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
def test_equal_models_load_and_others_not(tmp_path: Path, saved: dict[str, Any], mine: dict[str, Any], message: str) -> None:
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


# Hugging Face checkpoints are read and written piece by piece: memory beyond a rank's share is bounded.


LAYERS, FILES = 8, 6
MODEL: dict[str, Any] = {**FAMILIES["qwen3_moe"], "num_hidden_layers": LAYERS, "mlp_only_layers": []}
MODEL |= {"num_experts": 8, "moe_intermediate_size": 96}


Checkpoint = tuple[Path, dict[str, torch.Tensor]]


class CountingReader:
    """Stands in for `safetensors.safe_open`; counts files open at once and bytes of read tensors alive at once."""

    def __init__(self) -> None:
        self.real = safetensors.safe_open
        self.files = self.most_files = self.alive = self.most_alive = self.read = 0

    @contextmanager
    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with self.real(*args, **kwargs) as file:
            self.files += 1
            self.most_files = max(self.most_files, self.files)
            yield SimpleNamespace(keys=file.keys, get_slice=lambda name: _Slice(self, file.get_slice(name)))
            self.files -= 1

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.nbytes
        self.alive += size
        self.read += size
        self.most_alive = max(self.most_alive, self.alive)
        weakref.finalize(tensor.untyped_storage(), self._forget, size)
        return tensor

    def _forget(self, size: int) -> None:
        self.alive -= size


class _Slice:
    def __init__(self, counter: CountingReader, part: Any) -> None:
        self._counter, self._part = counter, part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._counter.count(self._part[index])


def parameters() -> dict[str, torch.Tensor]:
    """Returns random weights of the whole model by Hugging Face name."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(MODEL).items()}


def local_tensors(slices: list[WeightSlice]) -> dict[str, torch.Tensor]:
    """Returns tensors of NaN with the shapes that the slices describe."""
    shapes: dict[str, list[int]] = {}
    for piece in expand(slices):
        known = shapes.setdefault(piece.tensor, [0] * len(piece.local))
        shapes[piece.tensor] = [max(size, stop) for size, (_, stop) in zip(known, piece.local, strict=True)]
    return {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}


def imported(directory: Path, model: dict[str, Any] = MODEL) -> tuple[list[WeightSlice], dict[str, torch.Tensor]]:
    """Reads a checkpoint on a single rank. Returns its slices and tensors."""
    slices = megatron_weight_slices(model, ParallelLayout(), 0)
    tensors = local_tensors(slices)
    hf_load.load_hf(directory, slices, parameter_shapes(model), tensors)
    return slices, tensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    weights = parameters()
    names = sorted(weights)
    files = {f"model-{n:05d}-of-{FILES:05d}.safetensors": names[n::FILES] for n in range(FILES)}  # layers over all files
    for file, held in files.items():
        save_file({name: weights[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    yield tmp_path, weights


def test_a_check_reads_no_weights(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CountingReader()
    monkeypatch.setattr(safetensors, "safe_open", counter)
    hf_load.check_hf(checkpoint[0], parameter_shapes(MODEL))
    assert counter.files == counter.read == 0 and counter.most_files == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value: float, checkpoint: Checkpoint) -> None:
    directory, weights = checkpoint
    name = next(name for name in weights if name.endswith("layers.1.self_attn.o_proj.weight"))
    weights[name][3, 5] = value
    (directory / hf_load.INDEX).unlink()
    save_file(weights, directory / hf_load.SINGLE)
    with pytest.raises(CheckpointError, match=f"{directory}: parameter '{name}' has values that are NaN or infinite; .*"):
        imported(directory)


def test_the_files_tell_which_parameters_they_have(checkpoint: Checkpoint) -> None:
    directory, weights = checkpoint
    path = directory / hf_load.INDEX
    index = json.loads(path.read_text())
    first, *_, last = sorted(set(index["weight_map"].values()))
    index["weight_map"] |= {"model.norm.weight": first, "lm_head.bias": last}
    del index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(index))
    stored = hf_load.stored_parameters(directory)
    assert {name: one.shape for name, one in stored.items()} == {name: tuple(one.shape) for name, one in weights.items()}
    imported(directory)


def test_a_check_finds_damaged_files(checkpoint: Checkpoint) -> None:
    directory, shapes = checkpoint[0], parameter_shapes(MODEL)
    path, index = sorted(directory.glob("*.safetensors"))[-1], directory / hf_load.INDEX
    content = path.read_bytes()
    for damaged in (b"", content[:1000], content[:-1], b"\xff" * 5000):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"cannot read {path}: .*the file is missing or damaged"):
            hf_load.check_hf(directory, shapes)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"cannot read {path}: No such file"):
        hf_load.check_hf(directory, shapes)
    for text in ("{", "[]", '{"weight_map": []}', '{"weight_map": {"w": 3}}'):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=rf"cannot read the weights in {directory}: .*expected {hf_load.SINGLE}"):
            hf_load.check_hf(directory, shapes)
    index.unlink()
    with pytest.raises(CheckpointError, match=rf"cannot read the weights in {directory}: .*No such file"):
        hf_load.check_hf(directory, shapes)


@pytest.mark.parametrize(
    "layout", [ParallelLayout(), ParallelLayout(tp=2, pp=2, dp=2, ep=4, etp=1)], ids=["single", "tp2pp2ep4"]
)
def test_an_import_holds_one_piece(layout: ParallelLayout, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, weights = checkpoint
    counter = CountingReader()
    monkeypatch.setattr(safetensors, "safe_open", counter)
    slices = megatron_weight_slices(MODEL, layout, layout.world_size - 1)
    tensors = local_tensors(slices)
    hf_load.load_hf(directory, slices, parameter_shapes(MODEL), tensors)
    share = sum(tensor.nbytes for tensor in tensors.values())
    layer = sum(weight.nbytes for name, weight in weights.items() if name.startswith("model.layers.0."))
    assert counter.most_files == 1 and counter.alive == 0
    assert counter.most_alive < layer / 2
    assert counter.read == share  # nothing that belongs to other ranks is read
    for piece in expand(slices):
        expected = weights[piece.name][tuple(slice(*extent) for extent in piece.box)]
        assert torch.equal(hf_load.local_view(tensors[piece.tensor], piece), expected), piece.name


def test_an_export_holds_at_most_a_file(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, weights = checkpoint
    limit = sum(weight.nbytes for weight in weights.values()) // 5
    monkeypatch.setattr(hf_export, "FILE_BYTES", limit)
    slices, tensors = imported(directory)
    hf_export.export_hf(directory, tmp_path / "out", [slices], tensors, 0, None, "float32")
    found = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        assert path.stat().st_size < limit + (1 << 16)  # and its header
        found |= load_file(path)
    assert set(found) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, r"embed_tokens.weight' has shape \[300, 32\], expected \[300, 64\]"),
        ({"vocab_size": 299}, r"embed_tokens.weight' has shape \[300, 32\], expected \[299, 32\]"),
        ({"num_hidden_layers": LAYERS - 1}, r"parameters that config.json does not define, such as 'model.layers.7"),
        ({"num_experts": 4}, r"does not define, such as 'model.layers.0.mlp.experts.4"),
        ({"num_hidden_layers": LAYERS + 1}, r"no parameter 'model.layers.8"),
    ],
)
def test_weights_of_another_model_are_rejected(change: dict[str, int], message: str, checkpoint: Checkpoint) -> None:
    """Including larger ones that contain this model's shapes."""
    model = {**MODEL, **change}
    with pytest.raises(CheckpointError, match=message):
        imported(checkpoint[0], model)
    with pytest.raises(CheckpointError, match=message):
        hf_load.check_hf(checkpoint[0], parameter_shapes(model))


def test_layers_of_token_prediction_are_not_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """They follow the model's own, as in GLM-4.5. An export says that it has none."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for file in checkpoint[0].glob("*safetensors*"):
        (source / file.name).symlink_to(file)
    model = {**MODEL, "num_hidden_layers": LAYERS - 1, "num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(model))
    hf_load.check_hf(source, parameter_shapes(model))
    slices, tensors = imported(source, model)
    hf_export.export_hf(source, out, [slices], tensors, 0, None, "float32")
    assert hf_load.read_hf_config(out)["num_nextn_predict_layers"] == 0
    hf_load.check_hf(out, parameter_shapes(model))


def test_an_export_replaces_the_last(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, weights = checkpoint
    (slices, tensors), out = imported(directory), tmp_path / "out"
    monkeypatch.setattr(hf_export, "FILE_BYTES", sum(weight.nbytes for weight in weights.values()) // 5)
    hf_export.export_hf(directory, out, [slices], tensors, 0, None, "float32")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for tensor in tensors.values():
        tensor.zero_()
    with monkeypatch.context() as patched, pytest.raises(OSError, match="disk is full"):
        patched.setattr(hf_export, "_copy_companions", Mock(side_effect=OSError("the disk is full")))
        hf_export.export_hf(directory, out, [slices], tensors, 0, None, "float32")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert not out.with_name("out.partial").exists()

    monkeypatch.setattr(hf_export, "FILE_BYTES", 1 << 40)
    hf_export.export_hf(directory, out, [slices], tensors, 0, None, "float32")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]  # no index of old files
    assert not any(tensor.any() for tensor in load_file(out / "model.safetensors").values())
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["out"]


def test_an_export_over_other_files_is_rejected(checkpoint: Checkpoint, tmp_path: Path) -> None:
    slices, tensors = imported(checkpoint[0])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="mine is not a Hugging Face model directory"):
        hf_export.export_hf(checkpoint[0], tmp_path / "mine", [slices], tensors, 0, None, "float32")
    assert (tmp_path / "mine" / "thesis.tex").exists()
