"""The loop over preferences with the unigram model: every step is that of plain torch, and a resumed run goes on with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from dagrl.cli.main import main
from dagrl.config import Config
from dagrl.config.file import dump_config, load_config
from dagrl.errors import StopRequestedError
from dagrl.run.session import LastStep
from dagrl.run.train import train
from dagrl.telemetry.record import read_metrics
from tests.integration.main_job import ROOT, SFT, steps_of
from tests.integration.test_async_grpo import configuration
from tests.integration.unigram_workers import SIZE

pytestmark = pytest.mark.usefixtures("one_cluster")

STEPS, PAIRS, BETA, RATE = 6, 4, 0.3, 2.0


def rows(count: int) -> list[dict[str, str]]:
    """Answers of different lengths: sevens are chosen, ones rejected."""
    return [{"prompt": f"{number}=", "chosen": "7" * (1 + number % 3), "rejected": f"1{number}"} for number in range(count)]


def preference_config(tmp_path: Path, name: str = "dpo", **sections: Any) -> Config:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(10)))
    merged: dict[str, Any] = {
        "algorithm": "dpo",
        "data": {"task": None, "path": str(path), "shuffle": False, "val_fraction": 0.2},
        "policy": {"train_global_batch_size": PAIRS, "optimizer": {"lr": RATE}},
        "preference": {"beta": BETA, "max_num_steps": STEPS, "val_period": 2},
        **sections,
    }
    return configuration(tmp_path, name, **merged)


def plain_losses(train_rows: list[tuple[list[int], list[int]]]) -> tuple[list[float], Tensor]:
    """DPO by plain gradient descent on the model's logits (Rafailov et al. 2023, equation 7)."""
    logits = torch.linspace(-0.5, 0.5, SIZE, dtype=torch.float32).requires_grad_()
    reference, losses = logits.detach().log_softmax(0), []
    for step in range(STEPS):
        taken = [train_rows[(step * PAIRS + place) % len(train_rows)] for place in range(PAIRS)]
        table = logits.log_softmax(0) - reference
        margins = torch.stack([table[chosen].sum() - table[rejected].sum() for chosen, rejected in taken])
        loss = -logsigmoid(BETA * margins).mean()
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits.detach() - RATE * gradient).requires_grad_()
        losses.append(float(loss.detach()))
    return losses, logits.detach()


@pytest.mark.slow
def test_kto_learns_single_answers_as_plain_torch(tmp_path: Path) -> None:
    """Ethayarajh et al. 2024, equations 7 and 8, with the KL of TRL."""
    path = tmp_path / "judged.jsonl"
    rows = [{"prompt": f"{number}=", "response": str(number) * 3, "label": number % 3 == 0} for number in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"task": None, "path": str(path), "shuffle": False, "val_fraction": 0}
    config = preference_config(tmp_path, "kto", algorithm="dagrl.examples.kto:Kto", data=data)
    train(config)
    answers = encoded(config)
    labels = torch.tensor([row["label"] for row in rows])
    logits = torch.linspace(-0.5, 0.5, SIZE, dtype=torch.float32).requires_grad_()
    reference, losses = logits.detach().log_softmax(0), []
    for step in range(STEPS):
        places = [(step * PAIRS + place) % len(answers) for place in range(PAIRS)]
        table = logits.log_softmax(0) - reference
        own, others = (torch.stack([table[answers[place][side]].sum() for place in places]) for side in (0, 1))
        kl = others.detach().mean().clamp(min=0)
        loss = (1 - torch.sigmoid(BETA * torch.where(labels[places], own - kl, kl - own))).mean()
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits.detach() - RATE * gradient).requires_grad_()
        losses.append(float(loss.detach()))
    assert [step["loss"] for step in steps_of(config)] == pytest.approx(losses, abs=1e-6)
    assert losses[0] == 0.5 and losses[-1] < 0.49


def encoded(config: Config) -> list[tuple[list[int], list[int]]]:
    """Returns the tokens of the answers of the training pairs, as numbers of the unigram model."""
    from dagrl.run.preflight import preflight

    pairs = preflight(config).preferences
    sides = [
        [(answer.tokens[answer.loss_mask > 0] % SIZE).tolist() for answer in (pair.chosen, pair.rejected)] for pair in pairs
    ]
    return [(chosen, rejected) for chosen, rejected in sides]


def test_every_step_is_that_of_plain_torch(tmp_path: Path) -> None:
    """Also of a run that is resumed, which goes on with its reference policy."""
    config = preference_config(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    with pytest.raises(StopRequestedError):
        train(config, last_step=LastStep(3))
    assert main(["train", str(path), "checkpointing.resume=true"]) == 0
    steps = steps_of(config)
    losses, _ = plain_losses(encoded(config))
    assert [step["loss"] for step in steps] == pytest.approx(losses, abs=1e-6)
    assert losses[0] == pytest.approx(0.6931, abs=1e-4) and losses[-1] < 0.6
    assert {step["stage"] for step in steps} == {"dpo"} and steps[-1]["preference/accuracy"] == 1.0
    first = read_metrics(Path(config.output_dir) / config.name / "metrics.jsonl")[0]
    assert first["validation/loss"] == pytest.approx(losses[0]) and steps[-1]["validation/preference/accuracy"] == 1.0


RUN_STEPS = 20


def megatron_configuration(tmp_path: Path, algorithm: str, *overrides: str) -> Config:
    """Questions of which a tenth is held out; every right answer is the same word."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{number} is ", "chosen": "even", "rejected": "odd"} for number in range(100, 300, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        *(f"algorithm={algorithm}", f"output_dir={tmp_path}"),
        f"data.path={path}",
        *(f"preference.max_num_steps={RUN_STEPS}", "preference.val_period=0"),
        *("policy.train_global_batch_size=32", "policy.sequence_packing.enabled=true"),
        "policy.sequence_packing.train_mb_tokens=256",
        *("cluster.num_cpus=2", "cluster.num_gpus=0"),
        *overrides,
    )
    return load_config(ROOT / SFT, words)


@pytest.mark.slow
def test_a_reward_model_learns_preferences(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    config = megatron_configuration(tmp_path, "reward_model")
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
