"""Names, shapes and elements of weights are those of Megatron's own modules."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from dagrl.errors import ConfigError
from tests.unit.workers.test_megatron_architecture import REAL_CASES

WITHOUT_COLLECTIONS = "import gc, runpy, sys; gc.disable(); runpy.run_module(sys.argv[1], run_name='__main__')"


def test_names_shapes_and_elements_match_megatron_core() -> None:
    """All ranks of several layouts, built one after the other in one process over torch's fake process group."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    command = [sys.executable, "-c", WITHOUT_COLLECTIONS, "tests.unit.workers.megatron_shapes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("agrees") == len(REAL_CASES)


def test_a_gpu_without_the_kernels_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, features = pytest.importorskip("torch"), pytest.importorskip("dagrl.workers.vllm.features")
    pytest.importorskip("vllm")
    features.require_batch_invariance()  # nothing to require of a CPU
    found = {"is_available": lambda: True, "get_device_capability": lambda: (8, 0), "get_device_name": lambda: "A100"}
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**found))
    with pytest.raises(ConfigError, match=r"policy\.deterministic is true.*9\.0; A100 has compute capability 8\.0"):
        features.require_batch_invariance()
