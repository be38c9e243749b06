"""Tasks: functions that make the examples of a run. `data.task` names one, `data.task_args` are its arguments."""

from __future__ import annotations

import random

from dagrl.data import Example, Splits

Operands = tuple[int, int]


def arithmetic(
    digits: int = 2,
    carry: bool = False,
    held_out: int = 256,
    right_share: float = 1.0,
    demonstrations_per_prompt: int = 10,
    seed: int = 0,
) -> Splits:
    """Makes additions `a+b=` of numbers with `digits` digits (1 or 2); `held_out` of them are for validation only.

    Without `carry`, digits never add up to more than 9.
    Every training prompt has `demonstrations_per_prompt` demonstrations. A share `right_share` of them is the sum; the
    others repeat one of the two numbers. A model that imitates them is right that often, which leaves GRPO something to
    learn: the reference of a prompt is always the sum. Raises ValueError for arguments out of range.
    """
    if digits not in (1, 2):
        raise ValueError(f"digits is {digits}; expected: 1 or 2")
    numbers = range(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
    pairs = ((a, b) for a in numbers for b in numbers)
    operands = [(a, b) for a, b in pairs if carry or (a % 10 + b % 10 < 10 and a // 10 + b // 10 < 10)]
    if not 0 < held_out < len(operands):
        raise ValueError(
            f"held_out is {held_out}; expected: 1 to {len(operands) - 1}, as there are {len(operands)} additions"
        )
    if not 0 <= right_share <= 1 or demonstrations_per_prompt < 1:
        raise ValueError(
            f"right_share is {right_share} and demonstrations_per_prompt {demonstrations_per_prompt}; expected: 0 to 1, and "
            "at least 1"
        )
    generator = random.Random(seed)  # noqa: S311  # shuffling, not cryptography
    generator.shuffle(operands)
    validation, train = operands[:held_out], operands[held_out:]
    right = round(right_share * demonstrations_per_prompt)
    demonstrations = [
        _addition(pair, answer)
        for pair in train
        for answer in [sum(pair)] * right + [generator.choice(pair) for _ in range(demonstrations_per_prompt - right)]
    ]
    return Splits(
        tuple(demonstrations),
        tuple(_addition(pair, sum(pair)) for pair in train),
        tuple(_addition(pair, sum(pair)) for pair in validation),
    )


def _addition(pair: Operands, answer: int) -> Example:
    return Example(f"{pair[0]}+{pair[1]}=", str(answer), source=f"the addition {pair[0]}+{pair[1]}")
