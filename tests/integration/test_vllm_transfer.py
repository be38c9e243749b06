"""vLLM's own weight transfers with the backend dagrl, in engines as any user starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.vllm_llm import take_refits
from tests.integration.vllm_models import make_checkpoint
from tests.integration.vllm_ranks import Ranks

ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def test_any_llm_takes_refits(vllm_ranks: Ranks, tmp_path: Path) -> None:
    models = [str(make_checkpoint(tmp_path / str(seed), "qwen3", seed=seed)) for seed in range(2)]
    vllm_ranks.apart(take_refits, *models, 1, {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})


@pytest.mark.slow
@pytest.mark.timeout(500)  # imports vLLM four times
def test_an_llm_with_processes_of_its_own_takes_refits(tmp_path: Path) -> None:
    """An engine and two workers."""
    pytest.importorskip("vllm")
    models = [str(make_checkpoint(tmp_path / str(seed), "qwen3", seed=seed)) for seed in range(2)]
    code = "import sys; from tests.integration.vllm_llm import take_refits; take_refits(*sys.argv[1:], 2, {})"
    own = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = [sys.executable, "-c", code, *models]
    with subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            _, errors = process.communicate()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its engine would live on
    assert process.returncode == 0, errors[-4000:]
