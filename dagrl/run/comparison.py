"""Compares steps that were executed again with their records: rollouts token by token, metrics, and weights.

    comparison = compare(recorded, found, step=12)     # bit for bit, or within `bounds`
    comparison.differences      # beyond the bounds, the nearest to the cause first
    comparison.largest          # of each column, metric and tensor that is not equal

Equal layouts on equal machines compute equal numbers. Elsewhere sums have another order, and `BOUNDS` hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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

NATS = frozenset({"logprobs", "train_logprobs", "reference_logprobs", "entropy"})


@dataclass(frozen=True)
class Bounds:
    """The largest differences of a step on another machine or in another layout.

    `nats`: of a log-probability or an entropy. `relative`: of a metric; small ones may differ by `nats`. A weight may differ
    by `rates` learning rates for each optimizer step executed: two, as Adam's update of a gradient near 0 may have either
    sign; and by `rounding` of its size.
    """

    nats: float
    relative: float
    rounding: float
    rates: float = 2.0


EXACT = Bounds(0.0, 0.0, 0.0, rates=0.0)

BOUNDS = {"float32": Bounds(1e-3, 1e-2, 1e-5), "bfloat16": Bounds(0.5, 0.1, 2**-7)}
"""By the precision of the weights."""


MOST_SHOWN = 10
"""Differences that the error lists."""


@dataclass(frozen=True)
class Difference:
    """A value of `step` that was not reproduced; `name` is a column of the rollouts, a metric, or a tensor of weights."""

    step: int
    name: str
    where: str
    recorded: object
    found: object

    def describe(self) -> str:
        """Returns one line."""
        return f"step {self.step}: {self.name}{self.where} was {self.recorded!r}, and is now {self.found!r}"


@dataclass(frozen=True)
class WeightDifference:
    """A tensor of a train worker that differs from a checkpoint's: the first such entry, and the largest difference."""

    name: str
    rank: int
    index: tuple[int, ...]
    recorded: float
    found: float
    largest: float  # over all entries
    scale: float  # largest absolute value of the checkpoint's tensor


@dataclass
class Comparison:
    """Counts of compared values over all executed steps, differences beyond the bounds, and the largest ones by name."""

    first_step: int
    last_step: int
    bounds: Bounds = EXACT
    tokens: int = 0
    metrics: int = 0
    weights: int = 0  # tensors, over all workers
    differences: list[Difference] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, size: float) -> None:
        """Keeps the largest difference of `name`."""
        self.largest[name] = max(self.largest.get(name, 0.0), size)

    def add_weights(self, compared: int, weights: Iterable[WeightDifference], step_size: float) -> None:
        """Adds a comparison of weights; `step_size` is the sum of the learning rates of the optimizer steps executed."""
        self.weights += compared
        for weight in weights:
            self.note("weights", weight.largest)
            if not weight.largest <= self.bounds.rates * step_size + self.bounds.rounding * weight.scale:
                where = f" of train worker {weight.rank} at {list(weight.index)}"
                self.differences.append(Difference(self.last_step, weight.name, where, weight.recorded, weight.found))


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


def compare(recorded: Path, found: Path, step: int, bounds: Bounds = EXACT) -> Comparison:
    """Compares the steps up to `step` that the run `found` executed with those that `recorded` has."""
    lines, executed = (
        {int(line["step"] or 0): line for line in read_metrics(directory / "metrics.jsonl") if WALL_TIME in line}
        for directory in (recorded, found)
    )
    if step not in executed:
        raise RunError(f"step {step} was not executed: {found} has {sorted(executed)}")
    trained = sorted(at for at in executed if at <= step)
    comparison = Comparison(trained[0], step, bounds)
    before, now = (rollout_files(directory / "rollouts") for directory in (recorded, found))
    for at in trained:
        if at in before and at in now:
            _compare_rollouts(comparison, at, read_rollouts(before[at]), read_rollouts(now[at]))
        _compare_metrics(comparison, at, lines[at], executed[at])
    return comparison


def _compare_rollouts(comparison: Comparison, step: int, recorded: Sequence[Line], found: Sequence[Line]) -> None:
    """Adds the first difference of each column beyond its bound, columns in their order."""
    if len(recorded) != len(found):
        comparison.differences.append(Difference(step, "samples", "", len(recorded), len(found)))
        return
    comparison.tokens += sum(len(row["tokens"]) for row in recorded)
    for column in COLUMNS:
        differences = [
            difference
            for sample, (old, new) in enumerate(zip(recorded, found, strict=True))
            if not _same(old[column], new[column])
            for difference in _column_difference(comparison, step, column, f" of sample {sample}", old[column], new[column])
        ]
        comparison.differences += differences[:1]


def _column_difference(
    comparison: Comparison, step: int, column: str, where: str, old: Any, new: Any
) -> Iterable[Difference]:
    """Yields the first difference of a column of one sample, if it is beyond the bound; notes the largest."""
    if not isinstance(old, list) or not isinstance(new, list):
        yield Difference(step, column, where, old, new)
    elif len(old) != len(new):
        yield Difference(step, column, where, f"{len(old)} values", f"{len(new)} values")
    else:
        sizes = [0.0 if _same(*pair) else _distance(*pair) for pair in zip(old, new, strict=True)]
        comparison.note(column, max(sizes))
        bound = comparison.bounds.nats if column in NATS else 0.0
        at = next((at for at, size in enumerate(sizes) if not size <= bound), None)
        if at is not None:
            yield Difference(step, column, f"{where} at token {at}", old[at], new[at])


def _compare_metrics(comparison: Comparison, step: int, recorded: Line, found: Line) -> None:
    """Adds every metric that differs beyond its bound, or that only one side has (None), the loss first."""
    names = [name for name in {**recorded, **found} if not is_measured(name) and name not in OF_REPLAYS]
    comparison.metrics += len(names)
    for name in sorted(names, key=lambda name: (name != "loss", name)):
        old, new = recorded.get(name), found.get(name)
        if _same(old, new):
            continue
        size = _distance(old, new)
        comparison.note(name, size)
        if not size <= comparison.bounds.relative * abs(old or 0.0) + comparison.bounds.nats:
            comparison.differences.append(Difference(step, name, "", old, new))


def _distance(old: object, new: object) -> float:
    """Returns the absolute difference of two values; infinite unless both are numbers."""
    if not isinstance(old, int | float) or not isinstance(new, int | float) or isinstance(old, bool):
        return math.inf
    return abs(float(old) - float(new)) if math.isfinite(old) and math.isfinite(new) else math.inf


def _same(old: object, new: object) -> bool:
    """Returns whether two values of a record are equal bit for bit; NaN equals NaN."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(_same(*pair) for pair in zip(old, new, strict=True))
    return old == new or (old != old and new != new)
