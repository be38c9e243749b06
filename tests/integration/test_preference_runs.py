"""Runs on preferences with Megatron workers learn, and transformers gives the exported reward model's scores."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.run.train import train
from tests.integration.test_async_grpo import steps_of

QUICKSTART = Path(__file__).parents[2] / "examples" / "sft_quickstart.yaml"
STEPS = 20


def configuration(tmp_path: Path, algorithm: str, *overrides: str) -> Config:
    """Questions of which a tenth is held out; every right answer is the same word."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{number} is ", "chosen": "even", "rejected": "odd"} for number in range(100, 300, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        f"algorithm={algorithm}",
        f"data.path={path}",
        f"output_dir={tmp_path}",
        f"preference.max_num_steps={STEPS}",
        "preference.val_period=0",
        "policy.train_global_batch_size=32",
        "policy.sequence_packing.enabled=true",
        "policy.sequence_packing.train_mb_tokens=256",
        "cluster.num_cpus=2",
        "cluster.num_gpus=0",
        *overrides,
    )
    return load_config(QUICKSTART, words)


@pytest.mark.slow
def test_a_reward_model_learns_preferences(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    monkeypatch.setattr("dagrl.run.fleet.ray_cluster", lambda *args, **options: nullcontext())
    config = configuration(tmp_path, "reward_model")
    train(config)
    steps = steps_of(config)
    assert steps[-1]["loss"] < 0.3 and steps[-1]["validation/preference/accuracy"] > 0.9
    directory = tmp_path / config.name / "final_model"
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.config.num_labels == 1

    def score(text: str) -> float:
        messages = [{"role": "user", "content": "142 is "}, {"role": "assistant", "content": text}]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            return float(model(ids).logits)

    assert score("even") > score("odd") + 1
