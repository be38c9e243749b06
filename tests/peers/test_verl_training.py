"""verl's own training, both ways: its `TrainingWorker` with FSDP2 on the CPU, and its SFT trainer with one line changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import pytest
import ray
import torch
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer import sft_trainer_ray
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import sft_loss

from dagrl.embed.verl import accelerate

pytestmark = pytest.mark.usefixtures("verl_cluster")

WORKERS, VOCABULARY, STEPS = 2, 512, 3
ENGINE = {
    "strategy": "fsdp2",
    "use_dynamic_bsz": False,
    "micro_batch_size_per_gpu": 2,
    "use_remove_padding": False,
    "max_token_len_per_gpu": 512,
    "use_torch_compile": False,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen3 with random weights and a tokenizer of one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(
        vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2")  # noqa: S106
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(path)
    return str(path)


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


def sft_config(model: str, data: Path, logs: Path) -> Any:
    overrides = [
        f"model.path={model}",
        "model.use_remove_padding=False",
        "+model.override_config.attn_implementation=sdpa",
        f"data.train_files={data}",
        "data.train_batch_size=8",
        "data.micro_batch_size_per_gpu=2",
        "data.use_dynamic_bsz=False",
        "data.max_length=64",
        "data.max_token_len_per_gpu=512",
        "data.ignore_input_ids_mismatch=True",
        *[f"engine.{name}={value}" for name, value in ENGINE.items()],
        "optim.lr=1e-3",
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={WORKERS}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=1",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={logs}",
        "trainer.resume_mode=disable",
        "trainer.balance_batch=False",
        "checkpoint.save_contents=[]",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("sft_trainer_engine", overrides)


class Losses:
    """In place of verl's `Tracking`: keeps the losses that the trainer logs."""

    logged: list[float]

    def __init__(self, **settings: Any) -> None:
        Losses.logged = []

    def log(self, data: dict[str, Any], step: int) -> None:
        if "train/loss" in data:
            Losses.logged.append(data["train/loss"])


def test_an_sft_trainer_of_verl_runs_with_one_line_changed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(5)
    words = [[f"w{3 + number}" for number in torch.randint(400, (12,), generator=generator).tolist()] for _ in range(32)]
    rows = [
        [{"role": "user", "content": " ".join(row[:5])}, {"role": "assistant", "content": " ".join(row[5:])}]
        for row in words
    ]
    pandas.DataFrame({"messages": rows}).to_parquet(tmp_path / "train.parquet")
    monkeypatch.setattr(sft_trainer_ray, "Tracking", Losses)
    losses = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        trainer = sft_trainer_ray.SFTTrainer(sft_config(model, tmp_path / "train.parquet", tmp_path / "logs"))
        monkeypatch.setattr(trainer.ckpt_handler, "save_checkpoint", lambda step: None)
        workers = trainer.training_client.workers
        if accelerated:
            trainer.training_client = accelerate(trainer.training_client)
        trainer.fit()
        losses.append(Losses.logged)
        for worker in workers:
            ray.kill(worker)
        for group in trainer.resource_pool.pgs:
            ray.util.remove_placement_group(group)
    assert len(losses[0]) == STEPS
    assert losses[1] == losses[0]
