"""Compares steps that were executed again with their records: rollouts token by token, metrics, and weights.

    comparison = compare(recorded, found, step=12)
    comparison.differences      # a line for each, bit for bit, the nearest to the cause first

Equal layouts on equal machines compute equal numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dagrl.errors import RunError
from dagrl.telemetry.metrics import TIMING, is_measured
from dagrl.telemetry.record import read_metrics
from dagrl.telemetry.rollouts import read_rollouts, rollout_files

Line = Mapping[str, Any]

WALL_TIME = TIMING + "total"  # of trained steps; a validation before the first step has none

OF_REPLAYS = frozenset({"replays", "padding_share", "microbatch_padding_share", "shared_prefix_share"})
"""Metrics of the execution of a step, not of its results: a resumed run refits once more, and quanta depend on the clock."""

COLUMNS = (
    *("source", "prompt_tokens", "tokens", "sampled", "versions", "logprobs", "finish_reason"),
    *("reward", "advantage", "valid", "train_logprobs", "reference_logprobs", "entropy"),
)
"""Columns of a rollout in the order in which a step computes them: the first that differs is nearest to the cause."""

MOST_SHOWN = 10
"""Differences that the error lists."""


@dataclass
class Comparison:
    """Counts of compared values over all executed steps, and a line for each of the first differences."""

    first_step: int
    last_step: int
    tokens: int = 0
    metrics: int = 0
    weights: int = 0  # tensors, over all workers
    differences: list[str] = field(default_factory=list)

    def add(self, step: int, what: str, recorded: object, found: object) -> None:
        """Adds a value of a step that was not reproduced: of a column of the rollouts, or a metric."""
        self.differences.append(f"step {step}: {difference(what, recorded, found)}")


def difference(what: str, recorded: object, found: object) -> str:
    """Returns the words for a value that was not reproduced."""
    return f"{what} was {recorded!r}, and is now {found!r}"


def report(comparison: Comparison) -> str:
    """Returns what was equal. Raises RunError with the differences, the first one first."""
    first, last = comparison.first_step, comparison.last_step
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    weights = f", {comparison.weights} tensors of weights" if comparison.weights else ""
    compared = f"{steps}: {comparison.tokens} tokens with their log-probabilities, {comparison.metrics} metrics{weights}"
    if comparison.differences:
        lines = comparison.differences[:MOST_SHOWN]
        more = len(comparison.differences) - len(lines)
        raise RunError("\n".join([f"{compared} differ", *lines, *([f"and {more} more"] if more else [])]))
    return f"bit-equal: {compared}\n"


def compare(recorded: Path, found: Path, step: int) -> Comparison:
    """Compares the steps up to `step` that the run `found` executed with those that `recorded` has."""
    lines, executed = (
        {int(line["step"] or 0): line for line in read_metrics(directory / "metrics.jsonl") if WALL_TIME in line}
        for directory in (recorded, found)
    )
    if step not in executed:
        raise RunError(f"step {step} was not executed: {found} has {sorted(executed)}")
    trained = sorted(at for at in executed if at <= step)
    comparison = Comparison(trained[0], step)
    before, now = (rollout_files(directory / "rollouts") for directory in (recorded, found))
    for at in trained:
        if at in before and at in now:
            _compare_rollouts(comparison, at, read_rollouts(before[at]), read_rollouts(now[at]))
        _compare_metrics(comparison, at, lines[at], executed[at])
    return comparison


def _compare_rollouts(comparison: Comparison, step: int, recorded: Sequence[Line], found: Sequence[Line]) -> None:
    """Adds the first difference of each column, columns in their order."""
    if len(recorded) != len(found):
        comparison.add(step, "samples", len(recorded), len(found))
        return
    comparison.tokens += sum(len(row["tokens"]) for row in recorded)
    for column in COLUMNS:
        values = ((sample, old[column], new[column]) for sample, (old, new) in enumerate(zip(recorded, found, strict=True)))
        different = next((value for value in values if not _same(*value[1:])), None)
        if different is not None:
            sample, old, new = different
            what = f"{column} of sample {sample}"
            if isinstance(old, list) and isinstance(new, list):
                at = next((at for at, pair in enumerate(zip(old, new, strict=False)) if not _same(*pair)), None)
                what, old, new = (
                    (f"number of {what}", len(old), len(new)) if at is None else (f"{what} at token {at}", old[at], new[at])
                )
            comparison.add(step, what, old, new)


def _compare_metrics(comparison: Comparison, step: int, recorded: Line, found: Line) -> None:
    """Adds every metric that differs, or that only one side has (None), the loss first."""
    names = [name for name in {**recorded, **found} if not is_measured(name) and name not in OF_REPLAYS]
    comparison.metrics += len(names)
    for name in sorted(names, key=lambda name: (name != "loss", name)):
        old, new = recorded.get(name), found.get(name)
        if not _same(old, new):
            comparison.add(step, name, old, new)


def _same(old: object, new: object) -> bool:
    """Returns whether two values of a record are equal bit for bit; NaN equals NaN."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(_same(*pair) for pair in zip(old, new, strict=True))
    return old == new or (old != old and new != new)
