"""Tasks: functions that make the examples of a run. `data.task` names one, `data.task_args` are its arguments."""

import io
import random

from dagrl.data import Example, Splits
from dagrl.data.examples import Message
from dagrl.data.media import IMAGE, Medium, id_of

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


NUMBERS = ("one", "two", "three", "four")
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "black": (20, 20, 20)}
SIDE, CELL = 64, 16  # pixels of an image of shapes, and of the cells of its grid, each of which has one shape at most


def shapes(
    images: int = 512, held_out: int = 128, right_share: float = 0.4, demonstrations_per_prompt: int = 5, seed: int = 0
) -> Splits:
    """Draws images of one to four squares and discs of one colour. The answer is number and colour, such as `two red`.

    `held_out` further images are for validation only. Every training image has `demonstrations_per_prompt` demonstrations.
    A share `right_share` of them is right; the others name the next number, or `one` for `four`. Needs Pillow.
    """
    generator = random.Random(seed)  # noqa: S311  # drawing, not cryptography
    train, demonstrations = list[Example](), list[Example]()
    right = round(right_share * demonstrations_per_prompt)
    for index in range(images):
        count, colour, medium = _drawing(generator)
        train.append(_naming(medium, f"{count} {colour}", f"image {index}"))
        wrong = [NUMBERS[NUMBERS.index(count) - len(NUMBERS) + 1]] * (demonstrations_per_prompt - right)
        demonstrations += [_naming(medium, f"{one} {colour}", f"image {index}") for one in [count] * right + wrong]
    validation = []
    for index in range(held_out):
        count, colour, medium = _drawing(generator)
        validation.append(_naming(medium, f"{count} {colour}", f"held-out image {index}"))
    return Splits(tuple(demonstrations), tuple(train), tuple(validation))


def _drawing(generator: random.Random) -> tuple[str, str, Medium]:
    """Draws an image. Returns number and colour of its shapes, and the image."""
    from PIL import Image, ImageDraw

    count, colour = generator.randrange(len(NUMBERS)) + 1, generator.choice([*COLOURS])
    image = Image.new("RGB", (SIDE, SIDE), "white")
    draw = ImageDraw.Draw(image)
    for cell in generator.sample(range((SIDE // CELL) ** 2), count):
        row, column = divmod(cell, SIDE // CELL)
        left, top = column * CELL + generator.randint(1, 4), row * CELL + generator.randint(1, 4)
        shape = generator.choice([draw.rectangle, draw.ellipse])
        shape((left, top, left + CELL - 6, top + CELL - 6), fill=COLOURS[colour])
    file = io.BytesIO()
    image.save(file, "PNG")
    return NUMBERS[count - 1], colour, Medium(file.getvalue(), id_of(file.getvalue()), (SIDE, SIDE))


def _naming(medium: Medium, answer: str, source: str) -> Example:
    question = Message("user", (IMAGE, {"type": "text", "text": "what is there"}), media=(medium,))
    return Example("", answer, (question, Message("assistant", answer)), source=source)
