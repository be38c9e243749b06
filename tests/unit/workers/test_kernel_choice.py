"""What computes a model's layers, with and without Transformer Engine, for which a test double stands in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from dagrl.config import PolicyConfig
from dagrl.errors import ConfigError
from dagrl.workers.megatron import cpu

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core")

GPU, CPU = torch.device("cuda"), torch.device("cpu")
ENGINE = "dagrl.workers.megatron.transformer_engine"


def policy(wanted: str = "auto", **keys: Any) -> PolicyConfig:
    section = {"precision": "bfloat16", "megatron_cfg": {"transformer_engine": wanted}, **keys}
    return PolicyConfig.model_validate(section)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A double of the module around Transformer Engine, which is installed as far as its version says."""
    module: Any = ModuleType(ENGINE)
    module.segment_attention, module.faster_attention = object(), object()
    monkeypatch.setitem(sys.modules, ENGINE, module)
    monkeypatch.setattr(import_module("dagrl.workers.megatron"), "transformer_engine", module, raising=False)
    set_version(monkeypatch, "2.20.2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return module


def set_version(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    for module in ("dagrl.config.kernel_checks", "dagrl.workers.megatron.cpu"):
        monkeypatch.setattr(f"{module}.engine_version", lambda: version)


def chosen(settings: PolicyConfig, device: torch.device = GPU) -> Any:
    from dagrl.workers.megatron.kernels import choose_attention

    return choose_attention(settings, device)


def own() -> Any:
    from dagrl.workers.megatron.attention import segment_attention

    return segment_attention


@pytest.mark.parametrize(
    ("wanted", "capability", "attention"),
    [
        ("auto", 9, "faster_attention"),
        ("always", 9, "segment_attention"),
        ("never", 9, None),
        ("auto", 10, None),  # where nothing was measured
        ("always", 10, "segment_attention"),
    ],
)
def test_transformer_engine_is_used_where_it_was_measured(
    wanted: str, capability: int, attention: str | None, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    assert chosen(policy(wanted)) is (own() if attention is None else getattr(engine, attention))


@pytest.mark.parametrize(
    ("keys", "device", "version", "reason"),
    [
        ({}, CPU, "2.20.2", "there is no GPU"),
        ({"precision": "float32"}, GPU, "2.20.2", "policy.precision is float32, and the kernels in use are for bfloat16"),
        ({"deterministic": True}, GPU, "2.20.2", "policy.deterministic is true, and not all of its kernels are"),
        ({}, GPU, None, r"it is not installed: install transformer_engine\[pytorch\]"),
        ({}, GPU, "2.9.0", "version 2.9.0 is installed: 2.20 is the oldest"),
    ],
)
def test_an_unusable_transformer_engine_is_replaced_or_an_error(
    engine: Any, keys: dict[str, Any], device: torch.device, version: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_version(monkeypatch, version)
    assert chosen(policy(**keys), device) == chosen(policy("never", **keys), device) == own()
    with pytest.raises(ConfigError, match=rf"transformer_engine is always, .*, but {reason}.*\. Otherwise set it to auto"):
        chosen(policy("always", **keys), device)


@pytest.fixture
def over_double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module around Transformer Engine, imported over a double that computes nothing."""
    package = import_module("dagrl.workers.megatron")
    import_module("dagrl.workers.megatron.kernels")  # and Megatron, before there is a double
    for name in ("", ".pytorch"):
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", MagicMock())
    monkeypatch.delitem(sys.modules, ENGINE, raising=False)
    yield import_module(ENGINE)
    del sys.modules[ENGINE], package.transformer_engine


def test_flash_attention_computes_what_cudnn_cannot(over_double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dagrl.workers.train.microbatches import make_segments

    taken: list[str] = []

    def take(name: str, query: Tensor) -> Tensor:
        taken.append(name)
        return query

    monkeypatch.setattr(over_double.attention, "segment_attention", lambda query, *_: take("flash", query))
    monkeypatch.setattr(over_double, "_attention", lambda *_: lambda query, *_, **__: take("engine", query))
    whole = [[16384]]
    cases = ([[256] * 8], (), 128), (whole, (), 128), ([[8192, 8192]], (-1, 0), 128), (whole, (), 256), (whole, (), 100)
    for rows, heads, size in cases:
        query = torch.empty(sum(rows[0]), 8, size, dtype=torch.bfloat16)
        over_double.faster_attention(query, query, query, make_segments(rows, 1, 0, CPU, heads), 1.0)
    assert taken == ["flash", "engine", "flash", "flash", "flash"]


def test_an_installation_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_version(monkeypatch, None)
    with monkeypatch.context() as patch:
        patch.setattr(cpu.importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
        cpu.import_engine()

    def broken(name: str) -> None:
        raise OSError("undefined symbol: cudnnFoo")

    set_version(monkeypatch, "2.20.2")
    monkeypatch.setattr(cpu.importlib, "import_module", broken)
    with pytest.raises(ConfigError, match=r"2\.20\.2 is installed, but its import fails: undefined symbol.*this torch, "):
        cpu.import_engine()


def test_the_cudnn_of_torch_is_loaded_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDNN_HOME", "")  # so that the test leaves it as it was
    monkeypatch.delenv("CUDNN_HOME")
    loaded: list[str] = []
    monkeypatch.setattr(cpu.ctypes, "CDLL", loaded.append)
    cpu._keep_cudnn(tmp_path / "absent")
    assert not loaded and "CUDNN_HOME" not in cpu.os.environ
    (tmp_path / "lib").mkdir()
    for name in ("libcudnn.so.9", "libcudnn_ops.so.9", "other.so"):
        (tmp_path / "lib" / name).touch()
    cpu._keep_cudnn(tmp_path)
    assert loaded == [str(tmp_path / "lib" / name) for name in ("libcudnn.so.9", "libcudnn_ops.so.9")]
    assert cpu.os.environ["CUDNN_HOME"] == str(tmp_path)
