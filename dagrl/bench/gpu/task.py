"""A task for benchmarks: prompts of a fixed length, and rewards that differ within every group."""

from __future__ import annotations

import random

from dagrl.data import Example, Splits


def prompts(count: int = 256, characters: int = 128, seed: int = 0) -> Splits:
    """Returns `count` prompts of random digits."""
    generator = random.Random(seed)  # noqa: S311  # not cryptography
    texts = ["".join(generator.choices("0123456789", k=characters)) for _ in range(count)]
    examples = tuple(Example(text, "0", source=f"prompt {number}") for number, text in enumerate(texts))
    return Splits(examples[:1], examples, examples[:1])


def alternating(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """Returns 0 and 1 in turn, so half of a group is better than the other half."""
    return [float(number % 2) for number in range(len(prompts))]
