"""Train and generation workers as two processes on one GPU: refits by CUDA IPC, with sleep and offload in between.

The truth is the checkpoint that the train worker exports: every slice in vLLM's memory equals it bit for bit (in FP8 what
torch on the CPU makes of it), and transformers gives the log-probabilities of what vLLM generates.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dagrl.config import Config
from dagrl.refit import Refit
from dagrl.rl.generation import FinishedRequest
from dagrl.runtime.actors import Resources
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker_group import WorkerGroup, call_together
from tests.gpu import refit_calls
from tests.gpu.test_refit_fp8 import PROMPTS, SIZES
from tests.gpu.test_vllm_worker import difference
from tests.integration.vllm_models import make_checkpoint
from tests.integration.vllm_ranks import requests

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")
pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")
CLOSE = {None: 0.05, "fp8": 0.3}  # mean difference of log-probabilities that the precision explains; a stale weight: above 1


def make_config(model: Path, precision: str | None, verify: str) -> Config:
    engine = {"max_num_seqs": 8, "kv_cache_memory_bytes": 256 << 20, "gpu_memory_utilization": 0.3, "precision": precision}
    policy = {
        "model_name": str(model),
        "precision": "bfloat16",
        "train_micro_batch_size": 2,
        "max_total_sequence_length": 128,
        "optimizer": {"lr": 0.01},
        "generation": {"colocated": {"enabled": True}, "vllm_cfg": engine},
    }
    return Config.model_validate(
        {"name": "t", "algorithm": "grpo", "data": {}, "policy": policy, "refit": {"verify": verify}}
    )


def sft_batch() -> Batch:
    lengths = np.array([30, 17, 25, 9])
    inside = np.arange(32)[None, :] < lengths[:, None]
    tokens = np.random.default_rng(1).integers(3, 1000, (4, 32)) * inside
    fields = {"tokens": tokens, "lengths": lengths, "loss_mask": inside.astype(np.float32)}
    return Batch(fields, {"global_valid_tokens": float(inside.sum()), "global_valid_sequences": 4.0, "lr": 0.01})


def generate(generation: WorkerGroup) -> list[FinishedRequest]:
    (result,) = generation.call("generate", requests(range(6), PROMPTS, new=16, steps=64, greedy=True))
    return sorted((result.request(row) for row in range(len(result))), key=lambda row: row.request_id)


@pytest.mark.parametrize(("precision", "verify"), [(None, "off"), ("fp8", "off"), ("fp8", "checksum")])
def test_refits_between_turns_on_one_gpu(cluster: None, tmp_path: Path, precision: str | None, verify: str) -> None:
    """Without verification the engine reads the train worker's tensors, which are offloaded between two refits."""
    from dagrl.workers.megatron import MegatronWorker
    from dagrl.workers.vllm import VllmWorker

    model = make_checkpoint(tmp_path / "model", seed=3, dtype=torch.bfloat16, norms=0.1, spread=0.06, **SIZES)
    config = make_config(model, precision, verify)
    half = Resources(num_gpus=0.5)
    train = WorkerGroup.create("train", MegatronWorker, ParallelLayout(), config, resources=half)
    generation = WorkerGroup.create("generation", VllmWorker, ParallelLayout(), config, resources=half)
    try:
        Refit.connect(train, generation, dtype="bfloat16", verify=config.refit.verify, timeout_s=30)
        for version in (1, 2, 3):
            train.call("train_step", sft_batch(), "likelihood")
            train.call("offload", ("gradients", "optimizer"))
            if version > 1:
                generation.call("wake_up", ["weights"])
            call_together(
                [(train, "send_weights", [(version,)]), (generation, "receive_weights", [(version,)])],
                deadline=Deadline(60, "the test's limit"),
            )
            exported = tmp_path / f"exported{version}"
            train.call("export_hf", str(exported))
            train.call("offload", ("weights",))
            generation.call("wake_up")
            state = load_file(exported / "model.safetensors")
            assert generation.call_function(refit_calls.differing, state) == [[]]
            rows = generate(generation)
            assert difference(exported, rows, PROMPTS, "cpu") < CLOSE[precision]
            assert {made for row in rows for made in row.versions} == {version}
            generation.call("sleep", 2)
            train.call("reload", ("weights", "gradients", "optimizer"))
    finally:
        generation.shutdown(20.0)
        train.shutdown(20.0)
