"""TRL's side of SFT in `bench peers`: SFTTrainer on full rows, padded or packed, bfloat16 over float32 weights."""

from __future__ import annotations

import random
import tempfile

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


def work(told: Told) -> None:
    """Builds the trainer and takes turns inside its loop."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from dagrl.bench.peers.trl_turns import Turns, trainer_arguments

    case = told.order.largest
    with tempfile.TemporaryDirectory() as output:
        arguments = trainer_arguments(output, min(MICROBATCH, case.sequences), case.sequences)
        trainer = SFTTrainer(
            model=str(told.order.model),
            args=SFTConfig(**arguments, packing=told.order.variant == "packed", max_length=case.length, learning_rate=1e-5),
            train_dataset=Dataset.from_list(rows(case)),
            processing_class=AutoTokenizer.from_pretrained(told.order.model),
            callbacks=[Turns(told, case)],
        )
        trainer.train()


if __name__ == "__main__":
    serve(work)
