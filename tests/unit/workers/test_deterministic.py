"""`policy.deterministic` in the environment of both kinds of workers, and on GPUs that lack the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.config import Config
from dagrl.workers.megatron import MegatronWorker
from dagrl.workers.vllm.environment import vllm_environment
from tests.integration.vllm_models import make_config


def config(tmp_path: Path, deterministic: bool, gpus: int) -> Config:
    made = make_config(tmp_path)
    policy = made.policy.model_copy(update={"deterministic": deterministic})
    return made.model_copy(update={"policy": policy, "cluster": made.cluster.model_copy(update={"gpus_per_worker": gpus})})


@pytest.mark.parametrize(("on", "gpus"), [(False, 1), (True, 1), (False, 0), (True, 0)])
def test_deterministic_runs_set_environment_variables(
    on: bool, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of a CPU share a sequence by what else is in the batch, so there is one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    made = config(tmp_path, on, gpus)
    generation, train = vllm_environment(made), MegatronWorker.environment(made)
    assert ("VLLM_BATCH_INVARIANT" in generation) == bool(on and gpus)
    assert generation["OMP_NUM_THREADS"] == ("1" if on and not gpus else "4")
    assert ("CUBLAS_WORKSPACE_CONFIG" in train) == on
