"""The task of the unigram runs: prompts that are numbers, a reward that likes one digit, an environment that talks back.

What is asked of these functions is written down, as they run in processes of their own.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagrl.data import Example, Splits

ASKED = "DAGRL_TEST_ASKED"


def numbers(count: int = 40, train_s: float = 0.0, engine_step_s: float = 0.0) -> Splits:
    """`count` prompts; the other arguments are read by the workers."""
    examples = tuple(Example(f"{number}=", str(number % 10), source=f"number {number}") for number in range(count))
    return Splits(examples, examples, examples[:8])


def likes_sevens(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    if ASKED in os.environ:
        with Path(os.environ[ASKED]).open("a") as file:
            file.write(json.dumps([prompts, completions]) + "\n")
    return [text.count("7") / max(len(text), 1) for text in completions]


class SaysNines:
    """Answers 99 to the first two turns; ends the sequence of prompt 3 at once."""

    def reset(self, example: Mapping[str, Any]) -> None:
        self.prompt, self.turns = example["prompt"], 0

    def step(self, completion: str) -> str | None:
        self.turns += 1
        return None if self.prompt == "3=" or self.turns > 2 else "99"
