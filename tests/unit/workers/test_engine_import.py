"""Megatron imports Transformer Engine where it is installed: what a broken installation says, and which cuDNN is loaded."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from dagrl.errors import ConfigError
from dagrl.workers.megatron import cpu


def test_an_installation_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cpu.importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
        cpu.import_engine()

    def broken(name: str) -> None:
        raise OSError("undefined symbol: cudnnFoo")

    monkeypatch.setattr(metadata, "version", lambda name: "2.20.2")
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
