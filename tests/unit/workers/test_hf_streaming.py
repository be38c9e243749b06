"""Hugging Face checkpoints are read and written piece by piece: memory in addition to a rank's own share is bounded."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from dagrl.errors import CheckpointError
from dagrl.refit.slices import WeightSlice, expand
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron.weights import megatron_weight_slices, parameter_shapes
from dagrl.workers.train import hf_export, hf_load
from tests.families import FAMILIES

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
            yield SimpleNamespace(get_slice=lambda name: _Slice(self, file.get_slice(name)))
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
    shapes: dict[str, list[int]] = {}
    for piece in expand(megatron_weight_slices(MODEL, ParallelLayout(), 0)):
        known = shapes.setdefault(piece.name, [0] * len(piece.box))
        shapes[piece.name] = [max(size, stop) for size, (_, stop) in zip(known, piece.box, strict=True)]
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


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
    with pytest.raises(CheckpointError, match=rf"cannot read the weights in {directory}: No such file"):
        hf_load.check_hf(directory, shapes)


@pytest.mark.parametrize(
    "layout", [ParallelLayout(), ParallelLayout(tp=2, pp=2, dp=2, ep=4, etp=1)], ids=["single", "tp2pp2ep4"]
)
def test_an_import_holds_one_piece_more(
    layout: ParallelLayout, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
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
