"""What a process may have in which libraries are imported before it is forked."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from dagrl.run.fork_server import gpus_unasked


def test_imports_count_gpus_without_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def opens_nvml() -> int:
        raise AssertionError("NVML was asked")

    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=opens_nvml, device_count=opens_nvml))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr("dagrl.run.fork_server.gpu_count", lambda: 2)
    with gpus_unasked():
        assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    assert torch.cuda.is_available is torch.cuda.device_count is opens_nvml
