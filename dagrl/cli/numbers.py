"""Types of numeric options, for argparse: `parser.add_argument("--steps", type=count)`."""

import argparse
import math
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

N = TypeVar("N", int, float)


def whole(text: str) -> int:
    """Parses a whole number of 0 or more."""
    return _parsed(text, int, lambda number: number >= 0, "a whole number of 0 or more")


def count(text: str) -> int:
    """Parses a whole number of 1 or more."""
    return _parsed(text, int, lambda number: number >= 1, "a whole number of 1 or more")


def positive(text: str) -> float:
    """Parses a finite number above 0."""
    return _parsed(text, float, lambda number: 0 < number < math.inf, "a number above 0")


def share(text: str) -> float:
    """Parses a part of a whole."""
    return _parsed(text, float, lambda number: 0 < number <= 1, "a number above 0, of 1 at most")


def finite(text: str) -> float:
    """Parses a finite number."""
    return _parsed(text, float, math.isfinite, "a finite number")


def _parsed(text: str, kind: Callable[[str], N], fits: Callable[[N], bool], expected: str) -> N:
    with suppress(ValueError):
        if fits(number := kind(text)):
            return number
    raise argparse.ArgumentTypeError(f"found {text!r}; expected {expected}")
