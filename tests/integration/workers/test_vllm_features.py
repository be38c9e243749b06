"""What vLLM's engines require of a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dagrl.errors import ConfigError


def test_a_gpu_without_the_kernels_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, features = pytest.importorskip("torch"), pytest.importorskip("dagrl.workers.vllm.features")
    pytest.importorskip("vllm")
    features.require_batch_invariance()  # nothing to require of a CPU
    found = {"is_available": lambda: True, "get_device_capability": lambda: (8, 0), "get_device_name": lambda: "A100"}
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**found))
    with pytest.raises(ConfigError, match=r"policy\.deterministic is true.*9\.0; A100 has compute capability 8\.0"):
        features.require_batch_invariance()
