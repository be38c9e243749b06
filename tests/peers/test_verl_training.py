"""verl's own training steps, both ways: its `TrainingWorker` with FSDP2 on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import ray
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import sft_loss

from dagrl.embed.verl import accelerate
from tests.peers.conftest import VOCABULARY

pytestmark = pytest.mark.usefixtures("verl_cluster")

WORKERS, STEPS = 2, 3
ENGINE = {
    "strategy": "fsdp2",
    "use_dynamic_bsz": False,
    "micro_batch_size_per_gpu": 2,
    "use_remove_padding": False,
    "max_token_len_per_gpu": 512,
    "use_torch_compile": False,
    "dtype": "float32",
}


def worker_group(model: str) -> Any:
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=model, use_remove_padding=False, override_config={"attn_implementation": "sdpa"}),
        engine_config=FSDPEngineConfig(
            forward_only=False, infer_max_token_len_per_gpu=512, infer_micro_batch_size_per_gpu=2, **ENGINE
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=None,
    )
    worker = RayClassWithInitArgs(ray.remote(TrainingWorker), config=config)
    return RayWorkerGroup(RayResourcePool([WORKERS], use_gpu=False), worker, device_name="cpu")


def batch(step: int) -> TensorDict:
    """Eight sequences of different lengths, as verl's SFT trainer makes them."""
    generator = torch.Generator().manual_seed(step)
    lengths = [5, 9, 12, 7, 8, 6, 11, 10]
    fields = {
        "input_ids": [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths],
        "position_ids": [torch.arange(length) for length in lengths],
        "loss_mask": [torch.ones(length, dtype=torch.int64) for length in lengths],
    }
    tensors = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in fields.items()}
    settings = {
        "use_remove_padding": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "max_token_len_per_gpu": 512,
        "temperature": 1.0,
        "global_batch_size": len(lengths),
        "pad_mode": "no_padding",
        "pad_token_id": 1,
    }
    made = tu.get_tensordict(tensors, settings)
    tu.assign_non_tensor(made, update_lr_scheduler=True, global_token_num=NonTensorData(lengths))
    return made


def trained(group: Any) -> list[Any]:
    """Loss and gradient norm of each step, and at the end the log-probabilities of one more batch."""
    group.reset()
    group.set_loss_fn(loss_fn=partial(sft_loss, config=None))
    steps = []
    for step in range(STEPS):
        metrics = tu.get(group.train_batch(batch(step)).get(), "metrics")
        steps.append((metrics["loss"], metrics["grad_norm"]))
    inferred = group.infer_batch(batch(STEPS)).get()
    return [*steps, tu.get(inferred, "log_probs").values()]


@pytest.fixture
def two_groups(model: str) -> Iterator[list[Any]]:
    groups = [worker_group(model) for _ in range(2)]
    yield groups
    for group in groups:
        for actor in group.workers:
            ray.kill(actor)


def test_training_steps_have_equal_losses(two_groups: list[Any]) -> None:
    *theirs, their_logprobs = trained(two_groups[0])
    *ours, our_logprobs = trained(accelerate(two_groups[1]))
    assert ours == theirs
    assert torch.equal(our_logprobs, their_logprobs)
    assert abs(theirs[0][0] - math.log(VOCABULARY)) < 1.0  # a random model
    assert len({loss for loss, _ in theirs}) == STEPS
