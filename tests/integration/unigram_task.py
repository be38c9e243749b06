"""The task of the unigram runs: prompts that are numbers, a reward that likes one digit, an environment that talks back.

What is asked of these functions is written down, as they run in processes of their own.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from dagrl.data import Example, Splits

ASKED = "DAGRL_TEST_ASKED"
RELEASED = "DAGRL_TEST_RELEASED"


def numbers(
    count: int = 40,
    train_s: float = 0.0,
    engine_step_s: float = 0.0,
    logprob_row_s: float = 0.0,
    die_at_version: int | None = None,
) -> Splits:
    """`count` prompts; the other arguments are read by the workers."""
    examples = tuple(Example(f"{number}=", str(number % 10), source=f"number {number}") for number in range(count))
    return Splits(examples, examples, examples[:8])


def likes_sevens(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """The share of sevens."""
    if ASKED in os.environ:
        with Path(os.environ[ASKED]).open("a") as file:
            file.write(json.dumps([prompts, completions]) + "\n")
    return [text.count("7") / max(len(text), 1) for text in completions]


def likes_some(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """Equal rewards for prompts of even numbers, which teach nothing."""
    liked = likes_sevens(prompts, completions, references)
    return [0.5 if int(prompt[:-1]) % 2 == 0 else reward for prompt, reward in zip(prompts, liked, strict=True)]


def says_nines(prompts: list[str], completions: list[str], references: list[str]) -> list[str | None]:
    """Answers 99 as long as there are fewer than two answers; ends the sequence of prompt 3 at once."""
    return [
        None if prompt == "3=" or text.count("99") >= 2 else "99" for prompt, text in zip(prompts, completions, strict=True)
    ]


def says_nines_after_a_while(prompts: list[str], completions: list[str], references: list[str]) -> list[str | None]:
    """The same; the first call is answered when the file that `RELEASED` names is there. Notes the rows of each call."""
    released = Path(os.environ[RELEASED])
    with released.with_suffix(".rows").open("a") as file:
        file.write(f"{len(prompts)}\n")
    try:
        released.with_suffix(".held").touch(exist_ok=False)
    except FileExistsError:
        return says_nines(prompts, completions, references)
    while not released.exists():
        time.sleep(0.01)
    return says_nines(prompts, completions, references)


def likes_sevens_and_fails(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """Raises for completions with an eight and for those of prompt 4."""
    if any("8" in text or prompt == "4=" for prompt, text in zip(prompts, completions, strict=True)):
        raise ValueError("no eights")
    return likes_sevens(prompts, completions, references)


def says_nines_and_fails(prompts: list[str], completions: list[str], references: list[str]) -> list[str | None]:
    """As `says_nines`; raises for completions with a zero."""
    if any("0" in text for text in completions):
        raise ValueError("no zeros")
    return says_nines(prompts, completions, references)
