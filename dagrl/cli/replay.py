"""`dagrl replay`: reports the comparison of a step that was executed again."""

from __future__ import annotations

from dagrl.errors import RunError
from dagrl.run.comparison import EXACT, Comparison

MOST_SHOWN = 10
"""Differences that the error lists."""


def report(comparison: Comparison) -> str:
    """Returns what was equal, or within the bounds. Raises RunError with the differences, the first one first."""
    compared = _compared(comparison)
    if not comparison.differences:
        exact = comparison.bounds == EXACT
        return f"bit-equal: {compared}\n" if exact else f"within bounds: {compared}\n{_largest(comparison)}"
    lines = [difference.describe() for difference in comparison.differences[:MOST_SHOWN]]
    more = len(comparison.differences) - len(lines)
    raise RunError("\n".join([f"{compared} differ", *lines, *([f"and {more} more"] if more else [])]))


def _compared(comparison: Comparison) -> str:
    first, last = comparison.first_step, comparison.last_step
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    weights = f", {comparison.weights} tensors of weights" if comparison.weights else ""
    return f"{steps}: {comparison.tokens} tokens with their log-probabilities, {comparison.metrics} metrics{weights}"


def _largest(comparison: Comparison) -> str:
    """The largest difference of each name, one a line."""
    bounds = comparison.bounds
    rules = (
        f"bounds: {bounds.nats:g} nats; {bounds.relative:g} of a metric; {bounds.tokens:g} of the tokens; "
        "two learning rates for each optimizer step, of a weight\n"
    )
    return rules + "".join(f"  {name}: differs by at most {size:.3g}\n" for name, size in comparison.largest.items())
