"""TRL's side of GRPO in `bench peers`: GRPOTrainer with vLLM colocated, bfloat16 over float32 weights."""

from __future__ import annotations

import gc
import math
import os
import random
import tempfile
from typing import TYPE_CHECKING, Any

from dagrl.bench.peers.case import GROUP, PeerCase
from dagrl.bench.peers.vllm_generate import engine_arguments
from dagrl.bench.turns import Told, serve
from dagrl.runtime.ports import reserve_port

if TYPE_CHECKING:
    from dagrl.bench.peers.trl_turns import Turns

PROMPTS = 4096
"""Prompts of the data set, which the trainer repeats."""


def arguments(case: PeerCase, output: str, share: float) -> dict[str, Any]:
    """Returns the arguments of GRPOConfig; `share` is the engine's part of the GPU's memory."""
    from dagrl.bench.peers.trl_turns import trainer_arguments

    return trainer_arguments(output, min(case.micro, case.sequences), case.sequences) | {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": share,
        "vllm_max_model_length": case.prompt + case.completion + 8,
        "num_generations": GROUP,
        "max_completion_length": case.completion,
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": 1e-6,
        "loss_type": "grpo",
        "vllm_importance_sampling_correction": False,
        "generation_kwargs": {"ignore_eos": True},
    }


def alternating(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Returns 0 and 1 in turn, as dagrl's side does."""
    return [float(number % 2) for number in range(len(completions))]


def engine_share(case: PeerCase) -> float:
    """Returns the part of the GPU's memory that gives the engine its weights and `kv_bytes`, with 2 GiB to compute in."""
    import torch

    from dagrl.workers.megatron.weights import parameter_shapes

    parameters = sum(math.prod(shape) for shape in parameter_shapes(case.shape.config).values())
    memory: int = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 8 << 30
    return (2 * parameters + case.kv_bytes + (2 << 30)) / memory


def set_engine(case: PeerCase) -> None:
    """Gives TRL's engine the attention, dtype and KV cache of dagrl's side, for which GRPOConfig has no keys. All trainers
    get one engine."""
    import trl.generation.vllm_generation as generation
    import vllm

    same = engine_arguments(case, "")
    own = {
        name: same[name] for name in ("attention_config", "dtype", "kv_cache_memory_bytes", "enforce_eager") if name in same
    }
    built: list[Any] = []

    def engine(*args: Any, **settings: Any) -> Any:
        if not built:
            built.append(vllm.LLM(*args, **(settings | own)))
        return built[0]

    generation.LLM = engine


def train(told: Told, turns: Turns, case: PeerCase, output: str) -> None:
    """Builds the trainer of a case and takes turns inside its loop, until the first turn of another case."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    draw = random.Random(0)  # noqa: S311  # not cryptography
    prompts = [{"prompt": "".join(draw.choices("0123456789", k=case.prompt))} for _ in range(PROMPTS)]
    trainer = GRPOTrainer(
        model=str(told.order.model),
        reward_funcs=alternating,
        args=GRPOConfig(**arguments(case, output, engine_share(told.order.largest))),
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(told.order.model),
        callbacks=[turns],
    )
    trainer.train()
    trainer.accelerator.free_memory()


def work(told: Told) -> None:
    """Takes turns of a trainer for each case, one after the other."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(reserve_port()))
    from dagrl.bench.peers.trl_turns import Turns, release

    set_engine(told.order.largest)
    turns = Turns(told, told.order.cases[0])
    with tempfile.TemporaryDirectory() as output:
        train(told, turns, turns.case, output)
        while turns.turn is not None:
            gc.collect()
            release()
            turns.case = turns.turn[0]
            train(told, turns, turns.case, output)


if __name__ == "__main__":
    serve(work)
