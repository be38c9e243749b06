"""SFT of models that take images, by a whole run: losses are those of a plain loop with transformers and torch's AdamW."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.config import Config
from dagrl.run.train import train
from dagrl.telemetry.record import read_metrics
from tests.unit.data.processors import FAMILIES, Family, processor_of
from tests.unit.data.test_media import CONVERSATIONS, png, truth, turns_of
from tests.unit.workers.test_fsdp_media import model_of

STEPS, RATE = 3, 1e-3
BATCH = ["several", "none", "the same twice", "one"]
"""With two workers of two rows each, or packed rows, some microbatches have images and others none."""

CASES = {
    "Qwen3-VL, two workers": (FAMILIES[0], {"fsdp_cfg": {"data_parallel_size": 2}, "train_micro_batch_size": 1}),
    "Qwen3-VL, packed": (FAMILIES[0], {"sequence_packing": {"enabled": True, "train_mb_tokens": 256}}),
    "Gemma 3, two workers, packed": (
        FAMILIES[1],
        {"fsdp_cfg": {"data_parallel_size": 2}, "sequence_packing": {"enabled": True, "train_mb_tokens": 256}},
    ),
}


def plain_losses(family: Family) -> list[float]:
    """Trains a copy of the model on whole conversations, one at a time. Returns the loss of each step."""
    from copy import deepcopy

    model = deepcopy(model_of(family)).train()
    vectors = [one for one in model.parameters() if one.ndim <= 1]
    matrices = [one for one in model.parameters() if one.ndim > 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    processor, found = processor_of(family), []
    for _ in range(STEPS):
        losses, count = [], 0
        for name in BATCH:
            turns = [turns_of(family, CONVERSATIONS[name])]
            inputs = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
            mask = torch.tensor(truth(family, CONVERSATIONS[name])["assistant_masks"])[1:]
            logprobs = model(**inputs).logits[0, :-1].log_softmax(-1)
            losses.append(-(logprobs.gather(-1, inputs["input_ids"][0, 1:, None])[:, 0] * mask).sum())
            count += int(mask.sum())
        loss = torch.stack(losses).sum() / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case == "Qwen3-VL, packed" else []) for case in CASES]
)
def test_losses_are_those_of_a_plain_loop(case: str, cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.run.fleet.ray_cluster", lambda *args, **options: nullcontext())  # joins the session's
    family, policy = CASES[case]
    model_of(family).save_pretrained(tmp_path / "model")
    processor_of(family).save_pretrained(tmp_path / "model")
    (tmp_path / "images").mkdir()
    for number in range(4):
        (tmp_path / "images" / f"{number}.png").write_bytes(png(number))
    rows = [{"messages": CONVERSATIONS[name]} for name in BATCH]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = Config.model_validate(
        {
            "name": "run",
            "output_dir": str(tmp_path),
            "algorithm": "sft",
            "policy": {
                "model_name": str(tmp_path / "model"),
                "backend": "fsdp",
                "precision": "float32",
                "max_total_sequence_length": 256,
                "train_global_batch_size": len(BATCH),
                "optimizer": {
                    **{"lr": RATE, "weight_decay": 0.01, "clip_grad": 1e9},
                    **{"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8},
                },
                **policy,
            },
            "sft": {"max_num_steps": STEPS},
            "data": {"path": str(tmp_path / "rows.jsonl"), "val_fraction": 0, "shuffle": False},
            "cluster": {"num_cpus": 2, "num_gpus": 0},
            "checkpointing": {"enabled": False, "export_hf": case.startswith("Gemma")},
        }
    )
    train(config)
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    np.testing.assert_allclose(losses, plain_losses(family), atol=1e-5, rtol=1e-5)
    if config.checkpointing.export_hf:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        model = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "final_model")
        assert AutoProcessor.from_pretrained(tmp_path / "run" / "final_model").image_token
        before = dict(model_of(family).named_parameters())
        assert any(not torch.equal(one, before[name]) for name, one in model.named_parameters() if "vision" in name)
