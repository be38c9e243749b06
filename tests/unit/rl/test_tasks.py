"""The tasks: correct answers, held-out prompts, and the mix of demonstrations."""

from __future__ import annotations

import io
from collections import Counter
from itertools import product

import pytest
from hypothesis import given, strategies as st

from dagrl.data import Example
from dagrl.rl.tasks import COLOURS, NUMBERS, arithmetic, shapes


def operands(example: Example) -> tuple[int, int]:
    a, b = example.prompt.removesuffix("=").split("+")
    return int(a), int(b)


@given(st.integers(0, 5), st.integers(1, 50))
def test_held_out_prompts_are_not_trained_on(seed: int, held_out: int) -> None:
    splits = arithmetic(digits=1, held_out=held_out, seed=seed, demonstrations_per_prompt=2)
    train, validation = ({example.prompt for example in part} for part in (splits.train, splits.validation))
    assert len(validation) == held_out
    assert not train & validation
    assert {example.prompt for example in splits.demonstrations} == train
    assert splits == arithmetic(digits=1, held_out=held_out, seed=seed, demonstrations_per_prompt=2)
    every = {f"{a}+{b}=" for a, b in product(range(10), repeat=2) if a + b < 10}
    assert train | validation == every


def test_references_are_sums_without_carries() -> None:
    splits = arithmetic(digits=2)
    for example in (*splits.train, *splits.validation):
        a, b = operands(example)
        assert example.response == str(a + b)
        assert a % 10 + b % 10 == (a + b) % 10  # the last digits add up without a carry
        assert 10 <= min(a, b)
        assert a + b <= 99
    assert len(splits.train) + len(splits.validation) == 36 * 55  # tens 1..9 and ones 0..9, each adding up to at most 9
    assert any(sum(operands(example)) >= 100 for example in arithmetic(digits=2, carry=True).train)


def test_share_of_right_demonstrations() -> None:
    splits = arithmetic(digits=2, right_share=0.3, demonstrations_per_prompt=10)
    right: Counter[str] = Counter()
    for example in splits.demonstrations:
        a, b = operands(example)
        assert int(example.response) in (a + b, a, b)
        right[example.prompt] += int(example.response) == a + b
    assert set(right.values()) == {3}


@pytest.mark.parametrize("arguments", [{"digits": 3}, {"held_out": 0}, {"held_out": 1980}, {"right_share": 1.5}])
def test_arguments_out_of_range(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        arithmetic(**arguments)  # type: ignore[arg-type]


def test_answers_name_what_is_drawn() -> None:
    """Counted in the image: blocks of coloured pixels that touch."""
    from PIL import Image

    splits = shapes(images=40, held_out=20)
    for example in (*splits.train, *splits.validation):
        (medium,) = example.media
        assert isinstance(medium.data, bytes)
        image = Image.open(io.BytesIO(medium.data))
        assert (image.height, image.width) == medium.size
        pixels = {(x, y): image.getpixel((x, y)) for x in range(image.width) for y in range(image.height)}
        left = {place: colour for place, colour in pixels.items() if colour != (255, 255, 255)}
        (colour,) = set(left.values())
        count = 0
        while left:
            count, near = count + 1, [left.popitem()[0]]
            while near:
                x, y = near.pop()
                near += [at for at in ((x - 1, y), (x + 1, y), (x, y - 1), (x, y + 1)) if left.pop(at, None)]
        names = {rgb: name for name, rgb in COLOURS.items()}
        assert example.response == f"{NUMBERS[count - 1]} {names[colour]}"
    seen = {example.media[0].id for example in splits.train}
    assert not seen & {example.media[0].id for example in splits.validation}
    right = {example.media[0].id: example.response for example in splits.train}
    shares = Counter(example.response == right[example.media[0].id] for example in splits.demonstrations)
    assert shares == {True: 80, False: 120}
