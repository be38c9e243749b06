"""SFT of models that take images, by a whole run: losses are those of a plain loop with transformers and torch's AdamW."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    "Gemma 3, frozen, two workers, packed": (
        FAMILIES[1],
        {
            "fsdp_cfg": {"data_parallel_size": 2, "freeze_vision_tower": True},
            "sequence_packing": {"enabled": True, "train_mb_tokens": 256},
        },
    ),
}


def plain_losses(family: Family, *, frozen: bool) -> list[float]:
    """Trains a copy of the model on whole conversations, one at a time. Returns the loss of each step."""
    from copy import deepcopy

    model = deepcopy(model_of(family)).train()
    trained = [one for name, one in model.named_parameters() if not (frozen and "vision_tower" in name)]
    vectors = [one for one in trained if one.ndim <= 1]
    matrices = [one for one in trained if one.ndim > 1]
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


def config_of(family: Family, rows: Sequence[str], where: Path, keys: dict[str, Any]) -> Config:
    """Writes a family's model and the conversations of `rows`. Returns the configuration of a run on them."""
    model_of(family).save_pretrained(where / "model")
    processor_of(family).save_pretrained(where / "model")
    (where / "images").mkdir()
    for number in range(4):
        (where / "images" / f"{number}.png").write_bytes(png(number))
    (where / "rows.jsonl").write_text("\n".join(json.dumps({"messages": CONVERSATIONS[name]}) for name in rows))
    every = {"model_name": str(where / "model"), "backend": "fsdp", "precision": "float32", "max_total_sequence_length": 256}
    return Config.model_validate(
        {
            "name": "run",
            "output_dir": str(where),
            "cluster": {"num_cpus": 2, "num_gpus": 0},
            **keys,
            "policy": {**every, **keys["policy"]},
            "data": {"path": str(where / "rows.jsonl"), **keys["data"]},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_plain_loop(case: str, cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.run.fleet.ray_cluster", lambda *args, **options: nullcontext())  # joins the session's
    family, policy = CASES[case]
    keys = {
        "algorithm": "sft",
        "policy": {
            "train_global_batch_size": len(BATCH),
            "optimizer": {
                **{"lr": RATE, "weight_decay": 0.01, "clip_grad": 1e9},
                **{"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8},
            },
            **policy,
        },
        "sft": {"max_num_steps": STEPS},
        "data": {"val_fraction": 0, "shuffle": False},
        "checkpointing": {"enabled": False, "export_hf": case.startswith("Gemma")},
    }
    config = config_of(family, BATCH, tmp_path, keys)
    train(config)
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    np.testing.assert_allclose(losses, plain_losses(family, frozen="frozen" in case), atol=1e-5, rtol=1e-5)
    if config.checkpointing.export_hf:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        model = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "final_model")
        assert AutoProcessor.from_pretrained(tmp_path / "run" / "final_model").image_token
        before = dict(model_of(family).named_parameters())
        changed = [name for name, one in model.named_parameters() if not torch.equal(one, before[name])]
        assert any("projector" in name for name in changed) and not any("vision_tower" in name for name in changed)


@pytest.mark.parametrize(
    "family", [FAMILIES[0], pytest.param(FAMILIES[2], marks=pytest.mark.slow)], ids=lambda family: family.name
)
def test_engines_see_what_training_sees(
    family: Family, cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's log-probabilities are those of training, by its own weights and by refitted ones, tower and all."""
    pytest.importorskip("vllm")
    monkeypatch.setattr("dagrl.run.fleet.ray_cluster", lambda *args, **options: nullcontext())
    keys = {
        "algorithm": "grpo",
        "policy": {
            "train_global_batch_size": 16,
            "train_micro_batch_size": 8,
            "logprob_batch_size": 16,
            "sequence_packing": {"enabled": True, "train_mb_tokens": 512},
            "optimizer": {"lr": 3e-3, "weight_decay": 0.0},
            "generation": {
                "max_new_tokens": 24,
                "stop_token_ids": [],
                "colocated": {"enabled": False},
                "vllm_cfg": {"max_num_seqs": 16, "enforce_eager": True, "kv_cache_memory_bytes": 32 << 20},
            },
        },
        "sft": {"max_num_steps": 0},
        "grpo": {"max_num_steps": 4, "num_prompts_per_step": 4, "num_generations_per_prompt": 4, "val_period": 0},
        "reward": {"function": "tests.integration.rl.reward_functions:length"},
        "data": {"shuffle": False},
    }
    config = config_of(family, ["one", "several", "the same twice", "none"], tmp_path, keys)
    train(config)
    steps = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "gen_kl_error" in row]
    assert len(steps) == 4 and all(row["gen_kl_error"] < 1e-5 for row in steps), [row["gen_kl_error"] for row in steps]
    from transformers import AutoModelForImageTextToText

    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "final_model")
    before = dict(model_of(family).named_parameters())
    changed = [name for name, one in trained.named_parameters() if not torch.equal(one, before[name])]
    assert any("vis" in name for name in changed) and any("lm_head" in name for name in changed)
