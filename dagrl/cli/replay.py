"""`dagrl replay`: reports the comparison of a step that was executed again."""

from __future__ import annotations

from dagrl.errors import RunError
from dagrl.run.comparison import EXACT, Comparison

MOST_SHOWN = 10
"""Differences that the error lists."""


def report(comparison: Comparison) -> str:
    """Returns what was equal, or within the bounds. Raises RunError with the differences, the first one first."""
    first, last, bounds = comparison.first_step, comparison.last_step, comparison.bounds
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    weights = f", {comparison.weights} tensors of weights" if comparison.weights else ""
    compared = f"{steps}: {comparison.tokens} tokens with their log-probabilities, {comparison.metrics} metrics{weights}"
    if comparison.differences:
        lines = [difference.describe() for difference in comparison.differences[:MOST_SHOWN]]
        more = len(comparison.differences) - len(lines)
        raise RunError("\n".join([f"{compared} differ", *lines, *([f"and {more} more"] if more else [])]))
    if bounds == EXACT:
        return f"bit-equal: {compared}\n"
    largest = "".join(f"  {name}: differs by at most {size:.3g}\n" for name, size in comparison.largest.items())
    return f"within bounds ({bounds.nats:g} nats, {bounds.relative:g} of a metric): {compared}\n{largest}"
