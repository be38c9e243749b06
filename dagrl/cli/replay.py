"""`dagrl replay`: executes a step of a run again and reports the comparison."""

from __future__ import annotations

from pathlib import Path

from dagrl.errors import RunError
from dagrl.run.reexecute import Comparison, replay_step
from dagrl.run.train import train

MOST_SHOWN = 10
"""Differences that the error lists."""


def replay(directory: Path, step: int) -> str:
    """Returns what was equal. Raises RunError with the differences, the first one first."""
    comparison = replay_step(directory, step, train)
    compared = _compared(comparison)
    if not comparison.differences:
        return f"bit-equal: {compared}\n"
    lines = [difference.describe() for difference in comparison.differences[:MOST_SHOWN]]
    more = len(comparison.differences) - len(lines)
    raise RunError("\n".join([f"{compared} differ", *lines, *([f"and {more} more"] if more else [])]))


def _compared(comparison: Comparison) -> str:
    first, last = comparison.first_step, comparison.last_step
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    return f"{steps}: {comparison.tokens} tokens with their log-probabilities, {comparison.metrics} metrics"
