"""Compares a step that was executed again with its records: rollouts token by token, metrics, and weights.

    comparison = compare(recorded, found, lines, step=12)      # bit for bit, or within `bounds`
    comparison.differences      # beyond the bounds, the nearest to the cause first
    comparison.largest          # of each column, metric and tensor that was compared

Exact equality is what equal layouts on equal machines compute. Elsewhere sums have another order, and `BOUNDS` hold.
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
"""How a step was executed, not what it computed: a run that resumes refits once more, and quanta depend on the clock."""

MADE = ("source", "prompt_tokens", "tokens", "sampled", "versions", "logprobs", "finish_reason")
JUDGED = ("reward", "advantage", "valid")
SCORED = ("train_logprobs", "reference_logprobs", "entropy")

COLUMNS = (*MADE, *JUDGED, *SCORED)
"""Columns of a rollout in the order in which a step computes them: the first that differs is nearest to the cause."""

NATS = frozenset({"logprobs", *SCORED})
"""Columns in nats."""


@dataclass(frozen=True)
class Bounds:
    """The largest differences of a step on another machine or in another layout.

    `nats`: of a log-probability or an entropy. `relative`: of a metric; small ones may differ by `nats`. `tokens`: share of
    the generated tokens at which a sequence may go on with another token. A weight may differ by `rates` learning rates for
    each optimizer step executed: two, as Adam's update of a gradient near 0 may have either sign. `rounding`: of its size.
    """

    nats: float
    relative: float
    tokens: float
    rounding: float
    rates: float = 2.0


EXACT = Bounds(0.0, 0.0, 0.0, 0.0, rates=0.0)

BOUNDS = {"float32": Bounds(1e-3, 1e-2, 2e-3, 1e-5), "bfloat16": Bounds(0.5, 0.1, 0.05, 2**-7)}
"""By the precision of the weights."""


@dataclass(frozen=True)
class Difference:
    """A value of `step` that was not reproduced; `name` is a column of the rollouts, a metric, or a tensor of weights."""

    step: int
    name: str
    where: str
    recorded: object
    found: object

    def describe(self) -> str:
        """One line."""
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
    """What was compared, over all steps executed, what differs beyond the bounds, and the largest differences by name."""

    first_step: int
    last_step: int
    tokens: int = 0
    metrics: int = 0
    weights: int = 0  # tensors, over all workers
    differences: list[Difference] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)
    bounds: Bounds = EXACT

    def add(self, name: str, size: float) -> None:
        """Notes a difference of `size`."""
        self.largest[name] = max(self.largest.get(name, 0.0), size)

    def add_weights(self, compared: int, found: Iterable[WeightDifference], step_size: float) -> None:
        """Adds a comparison of weights; `step_size` is the sum of the learning rates of the optimizer steps executed."""
        self.weights += compared
        for one in found:
            self.add("weights", one.largest)
            if not one.largest <= self.bounds.rates * step_size + self.bounds.rounding * one.scale:
                where = f" of train worker {one.rank} at {list(one.index)}"
                self.differences.append(Difference(self.last_step, one.name, where, one.recorded, one.found))


def compare(
    recorded: Path,
    found: Path,
    lines: Sequence[Line],
    step: int,
    *,
    columns: Sequence[str] = COLUMNS,
    only_found: bool = False,
    bounds: Bounds = EXACT,
) -> Comparison:
    """Compares the steps that `found` executed with those that `recorded` has.

    `columns` are those of the rollouts that were computed again. Metrics that only the records have are differences, unless
    with `only_found` some phases of a step were not executed.
    """
    executed = [line for line in read_metrics(found / "metrics.jsonl") if int(line["step"] or 0) <= step]
    trained = sorted({int(line["step"] or 0) for line in executed if WALL_TIME in line})
    if step not in trained:
        raise RunError(f"step {step} was not executed: {found} has {trained}")
    comparison = Comparison(trained[0], step, bounds=bounds)
    before, now = (rollout_files(directory / "rollouts") for directory in (recorded, found))
    for at in trained:
        if at in before and at in now and columns:
            compare_rollouts(comparison, at, read_rollouts(before[at]), read_rollouts(now[at]), columns)
        old, new = (_line(of, at) for of in (lines, executed))
        if only_found:
            old = {name: value for name, value in old.items() if name in new}
        compare_metrics(comparison, at, old, new)
    return comparison


def _line(lines: Sequence[Line], step: int) -> dict[str, Any]:
    """The metrics of the line of a trained step that do not depend on how the step was executed."""
    found = next(line for line in lines if line["step"] == step and WALL_TIME in line)
    return {name: value for name, value in found.items() if not is_measured(name) and name not in OF_REPLAYS}


def compare_rollouts(
    comparison: Comparison, step: int, recorded: Sequence[Line], found: Sequence[Line], columns: Sequence[str] = COLUMNS
) -> None:
    """Adds the first difference of each column, columns in their order.

    With bounds, what follows another token is not compared: it is another sequence.
    """
    if len(recorded) != len(found):
        comparison.differences.append(Difference(step, "samples", "", len(recorded), len(found)))
        return
    made, bounds = sum(len(row["tokens"]) for row in recorded), comparison.bounds
    comparison.tokens += made
    flips = [_flip(old["tokens"], new["tokens"]) for old, new in zip(recorded, found, strict=True)]
    changed = sum(flip is not None for flip in flips)
    few = bounds.tokens > 0 and changed <= math.ceil(bounds.tokens * made)
    if "tokens" in columns:
        comparison.add("tokens", changed / max(made, 1))
    for column in columns:
        if few and column in MADE and column not in NATS:
            continue  # sequences that go on with another token have another end too
        pairs = [(old[column], new[column]) for old, new in zip(recorded, found, strict=True)]
        if bounds.tokens and column in NATS:
            pairs = [_until(pair, flip) for pair, flip in zip(pairs, flips, strict=True)]
        _add_first(comparison, step, column, pairs)


def _flip(old: Sequence[int], new: Sequence[int]) -> int | None:
    """The first token that differs; None if all are equal."""
    at = next((at for at, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
    return min(len(old), len(new)) if at is None and len(old) != len(new) else at


def _until(pair: tuple[Any, Any], end: int | None) -> tuple[Any, Any]:
    """The values up to token `end`, which are those of equal sequences."""
    return pair if end is None or any(one is None for one in pair) else (pair[0][:end], pair[1][:end])


def _add_first(comparison: Comparison, step: int, column: str, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Adds the first difference of a column beyond its bound, and notes the largest."""
    bound = comparison.bounds.nats if column in NATS else 0.0
    differing = [(row, old, new) for row, (old, new) in enumerate(pairs) if not same(old, new)]
    for _, old, new in differing if column in NATS else ():
        if isinstance(old, list) and isinstance(new, list):
            comparison.add(column, max(map(difference, old, new), default=math.inf))
    found = (_first(step, column, row, old, new, bound) for row, old, new in differing)
    comparison.differences += [one for one in found if one is not None][:1]


def _first(step: int, column: str, row: int, old: Any, new: Any, bound: float) -> Difference | None:
    if not isinstance(old, list) or not isinstance(new, list):
        return Difference(step, column, f" of sample {row}", old, new)
    if len(old) != len(new):
        return Difference(step, column, f" of sample {row}", f"{len(old)} values", f"{len(new)} values")
    places = enumerate(zip(old, new, strict=True))
    at = next((at for at, pair in places if not same(*pair) and not difference(*pair) <= bound), None)
    return None if at is None else Difference(step, column, f" of sample {row} at token {at}", old[at], new[at])


def compare_metrics(comparison: Comparison, step: int, recorded: Line, found: Line) -> None:
    """Adds every metric that differs beyond its bound, or that only one side has (None), the loss first."""
    comparison.metrics += len(recorded)
    for name in sorted(recorded.keys() | found.keys(), key=lambda name: (name != "loss", name)):
        old, new = recorded.get(name), found.get(name)
        if same(old, new):
            continue
        if isinstance(old, int | float) and isinstance(new, int | float):
            comparison.add(name, difference(old, new))
        if not difference(old, new) <= comparison.bounds.relative * abs(old or 0.0) + comparison.bounds.nats:
            comparison.differences.append(Difference(step, name, "", old, new))


def difference(old: object, new: object) -> float:
    """The absolute difference of two values; infinite unless both are numbers."""
    if not isinstance(old, int | float) or not isinstance(new, int | float) or isinstance(old, bool):
        return math.inf
    return abs(float(old) - float(new)) if math.isfinite(old) and math.isfinite(new) else math.inf


def same(old: object, new: object) -> bool:
    """Whether two values of a record are equal bit for bit; NaN equals NaN."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(same(*pair) for pair in zip(old, new, strict=True))
    return old == new or (old != old and new != new)
