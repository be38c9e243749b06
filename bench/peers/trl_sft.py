"""TRL's side of SFT in `bench peers`: SFTTrainer on full rows, padded or packed, bfloat16 over float32 weights."""

from __future__ import annotations

import random
import tempfile
from typing import Any

from dagrl.bench.peers.case import PeerCase
from dagrl.bench.turns import Told, serve

ROWS = 400
"""Rows of the data set, which the trainer repeats."""

MICROBATCH = 8


def rows(case: PeerCase) -> list[dict[str, str]]:
    """Returns rows of random digits, one token each, with a prompt of 24; the end of the text is one token."""
    draw = random.Random(0)  # noqa: S311  # not cryptography
    text = "".join(draw.choices("0123456789", k=ROWS * case.length))
    return [
        {"prompt": row[:24], "completion": row[24 : case.length - 1]}
        for row in (text[start : start + case.length] for start in range(0, len(text), case.length))
    ]


def arguments(case: PeerCase, packed: bool, output: str) -> dict[str, Any]:
    """Returns the arguments of SFTConfig."""
    import torch

    micro = min(MICROBATCH, case.sequences)
    return {
        "output_dir": output,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": case.sequences // micro,
        "max_length": case.length,
        "packing": packed,
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "max_steps": 1_000_000,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "learning_rate": 1e-5,
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"},
        "seed": 0,
    }


def work(told: Told) -> None:
    """Builds the trainer and takes turns inside its loop."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from dagrl.bench.peers.trl_turns import Turns

    case = told.order.largest
    with tempfile.TemporaryDirectory() as output:
        trainer = SFTTrainer(
            model=str(told.order.model),
            args=SFTConfig(**arguments(case, told.order.variant == "packed", output)),
            train_dataset=Dataset.from_list(rows(case)),
            processing_class=AutoTokenizer.from_pretrained(told.order.model),
            callbacks=[Turns(told, case)],
        )
        trainer.train()


if __name__ == "__main__":
    serve(work)
