"""TRL's side of GRPO in `bench peers`: GRPOTrainer with vLLM colocated, bfloat16 over float32 weights."""

from __future__ import annotations

import math
import os
import random
import tempfile
from typing import Any

from dagrl.bench.peers.case import GROUP, PeerCase
from dagrl.bench.peers.turns import Told, serve
from dagrl.runtime.ports import reserve_port

PROMPTS = 4096
"""Prompts of the data set, which the trainer repeats."""


def arguments(case: PeerCase, output: str, share: float) -> dict[str, Any]:
    """Returns the arguments of GRPOConfig; `share` is the engine's part of the GPU's memory."""
    micro = min(case.micro, case.sequences)
    return {
        "output_dir": output,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": share,
        "vllm_max_model_length": case.prompt + case.completion + 8,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": case.sequences // micro,
        "num_generations": GROUP,
        "max_completion_length": case.completion,
        "temperature": 1.0,
        "beta": 0.0,
        "bf16": True,
        "gradient_checkpointing": False,
        "max_steps": 1_000_000,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "learning_rate": 1e-6,
        "loss_type": "grpo",
        "vllm_importance_sampling_correction": False,
        "model_init_kwargs": {"dtype": "float32"},
        "generation_kwargs": {"ignore_eos": True},
        "disable_tqdm": True,
        "seed": 0,
    }


def alternating(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Returns 0 and 1 in turn, as dagrl's side does."""
    return [float(number % 2) for number in range(len(completions))]


def engine_share(case: PeerCase) -> float:
    """Returns the part of the GPU's memory that gives the engine its weights and `kv_bytes`, with 2 GiB to compute in."""
    import torch

    from dagrl.bench.models import parameter_shapes

    parameters = sum(math.prod(shape) for shape in parameter_shapes(case.shape.config).values())
    memory: int = torch.cuda.get_device_properties(0).total_memory
    return (2 * parameters + case.kv_bytes + (2 << 30)) / memory


def set_engine(kv_bytes: int) -> None:
    """Gives TRL's engine the attention, dtype and KV cache of dagrl's side; GRPOConfig has no keys for them."""
    import trl.generation.vllm_generation as generation
    import vllm

    def engine(*args: Any, **settings: Any) -> Any:
        same = {"attention_config": {"backend": "FLASH_ATTN"}, "dtype": "bfloat16", "kv_cache_memory_bytes": kv_bytes}
        return vllm.LLM(*args, **{**settings, **same})

    generation.LLM = engine


def work(told: Told) -> None:
    """Builds the trainer and takes turns inside its loop."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(reserve_port()))
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from dagrl.bench.peers.trl_turns import Turns

    case = told.order.largest
    set_engine(case.kv_bytes)
    draw = random.Random(0)  # noqa: S311  # not cryptography
    prompts = [{"prompt": "".join(draw.choices("0123456789", k=case.prompt))} for _ in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=str(told.order.model),
            reward_funcs=alternating,
            args=GRPOConfig(**arguments(case, output, engine_share(case))),
            train_dataset=Dataset.from_list(prompts),
            processing_class=AutoTokenizer.from_pretrained(told.order.model),
            callbacks=[Turns(told)],
        )
        trainer.train()


if __name__ == "__main__":
    serve(work)
