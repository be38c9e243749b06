"""Tasks of the benchmarks: prompts and rows of fixed lengths, and rewards that differ within every group."""

from __future__ import annotations

import random

from dagrl.data import Example, Splits


def prompts(count: int = 256, characters: int = 128, seed: int = 0) -> Splits:
    """Returns `count` prompts of random digits."""
    examples = tuple(
        Example(text, "0", source=f"prompt {number}") for number, text in enumerate(_texts(count, characters, seed))
    )
    return Splits(examples[:1], examples, examples[:1])


def rows(count: int = 16, length: int = 2048, seed: int = 0) -> Splits:
    """Returns `count` demonstrations of `length` tokens: a digit as the prompt, and a response with its end token."""
    texts = _texts(count, length - 1, seed)
    examples = tuple(Example(text[:1], text[1:], source=f"row {number}") for number, text in enumerate(texts))
    return Splits(examples, (), examples[:1])


def _texts(count: int, characters: int, seed: int) -> list[str]:
    generator = random.Random(seed)  # noqa: S311  # not cryptography
    return ["".join(generator.choices("0123456789", k=characters)) for _ in range(count)]


def alternating(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """Returns 0 and 1 in turn, so half of a group is better than the other half."""
    return [float(number % 2) for number in range(len(prompts))]
