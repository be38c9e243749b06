"""verl's SFT trainer with one line changed and its training steps have equal losses. Installing dagrl adds nothing more."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
import ray
import torch
from hydra import compose, initialize_config_module
from verl.trainer import sft_trainer_ray
from verl.utils import tensordict_utils as tu

from dagrl.bench.verl_steps import ENGINE, VOCABULARY, train, training_batch, training_group
from dagrl.embed.verl import accelerate

pytestmark = pytest.mark.usefixtures("verl_cluster")

WORKERS, STEPS = 2, 3


def sft_config(model: str, data: Path, logs: Path) -> Any:
    overrides = [
        f"model.path={model}",
        "model.use_remove_padding=False",
        "++model.override_config.attn_implementation=sdpa",
        *(f"data.train_files={data}", "data.train_batch_size=8", "data.micro_batch_size_per_gpu=2"),
        *("data.use_dynamic_bsz=False", "data.max_length=64", "data.max_token_len_per_gpu=512"),
        "data.ignore_input_ids_mismatch=True",
        *[f"++engine.{name}={value}" for name, value in ENGINE.items()],
        "optim.lr=1e-3",
        *("trainer.device=cpu", f"trainer.n_gpus_per_node={WORKERS}"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.total_epochs=1", "trainer.logger=[console]"),
        *(f"trainer.default_local_dir={logs}", "trainer.resume_mode=disable", "trainer.balance_batch=False"),
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


def test_an_sft_trainer_of_verl_runs_with_one_line_changed(model: str, tmp_path: Path, monkeypatch: Any) -> None:
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


ROOT = Path(__file__).parents[2]


def test_installing_dagrl_changes_nothing_of_verls() -> None:
    install = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-build-isolation", "--report", "-"]
    done = subprocess.run([*install, str(ROOT)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    installed = [item["metadata"]["name"] for item in json.loads(done.stdout)["install"]]
    assert installed == ["dagrl"]


def trained(group: Any) -> list[Any]:
    """Loss and gradient norm of each step, and at the end the log-probabilities of one more batch."""
    steps = [train(group, training_batch(step)) for step in range(STEPS)]
    inferred = group.infer_batch(training_batch(STEPS)).get()
    return [*steps, tu.get(inferred, "log_probs").values()]


@pytest.fixture
def two_groups(model: str) -> Iterator[list[Any]]:
    groups = [training_group(model, WORKERS) for _ in range(2)]
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
