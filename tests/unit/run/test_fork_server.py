"""What a process may have in which libraries are imported before it is forked."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from dagrl.run.fork_server import gpus_unasked, hidden


def test_imports_count_gpus_without_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def opens_nvml() -> int:
        raise AssertionError("NVML was asked")

    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=opens_nvml, device_count=opens_nvml))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr("dagrl.run.fork_server.gpu_count", lambda: 2)
    with gpus_unasked():
        assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    assert torch.cuda.is_available is torch.cuda.device_count is opens_nvml


def test_what_is_hidden_cannot_be_imported_meanwhile() -> None:
    with hidden("antigravity", "sys"):
        assert importlib.util.find_spec("antigravity") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("antigravity")
    assert importlib.util.find_spec("antigravity") is not None and sys.modules["sys"] is sys
