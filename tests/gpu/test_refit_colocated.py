"""Train and generation workers as two processes on one GPU: refits by CUDA IPC, with sleep and offload in between.

The truth is the checkpoint that the train worker exports: every slice in vLLM's memory equals it bit for bit (in FP8 what
torch on the CPU makes of it), and transformers gives the log-probabilities of what vLLM generates.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dagrl.config import Config
from dagrl.refit import Refit
from dagrl.runtime.actors import Resources
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker_group import WorkerGroup, call_together
from tests.gpu import refit_calls
from tests.integration.vllm_ranks import requests

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")
pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")
PROMPTS = [[3 + (7 * row + 11 * place) % 900 for place in range(5 + 9 * row)] for row in range(6)]
SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
CLOSE = {None: 0.05, "fp8": 0.3}  # mean difference of log-probabilities that the precision explains; a stale weight: above 1


def make_model(directory: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + noise * 0.1 if "norm" in name else noise * 0.06)
    model.save_pretrained(directory)
    return directory


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


def generate(generation: WorkerGroup) -> list[tuple[list[int], list[float], set[int]]]:
    (result,) = generation.call("generate", requests(range(6), PROMPTS, new=16, steps=64, greedy=True))
    rows = sorted((result.request(row) for row in range(len(result))), key=lambda row: row.request_id)
    return [(list(row.tokens), list(row.logprobs), set(row.versions)) for row in rows]


def mean_difference(checkpoint: Path, rows: list[tuple[list[int], list[float], set[int]]]) -> float:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).float().eval()
    found = []
    for (tokens, logprobs, _), prompt in zip(rows, PROMPTS, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
        expected = torch.log_softmax(logits[len(prompt) - 1 : -1], -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        found.append((torch.tensor(logprobs) - expected).abs())
    return float(torch.cat(found).mean())


@pytest.mark.parametrize(("precision", "verify"), [(None, "off"), ("fp8", "off"), ("fp8", "checksum")])
def test_refits_between_turns_on_one_gpu(cluster: None, tmp_path: Path, precision: str | None, verify: str) -> None:
    """Without verification the engine reads the train worker's tensors, which are offloaded between two refits."""
    from dagrl.workers.megatron import MegatronWorker
    from dagrl.workers.vllm import VllmWorker

    config = make_config(make_model(tmp_path / "model"), precision, verify)
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
            assert mean_difference(exported, rows) < CLOSE[precision]
            assert {versions for _, _, some in rows for versions in some} == {version}
            generation.call("sleep", 2)
            train.call("reload", ("weights", "gradients", "optimizer"))
    finally:
        generation.shutdown(20.0)
        train.shutdown(20.0)
