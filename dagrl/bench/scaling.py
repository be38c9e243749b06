"""Predicts the cost of a step on more workers than were measured, from a cost model fitted to a benchmark's rows.

    python -m dagrl.bench.scaling bench/results/4x-nvidia-h200/2026-11-22/overhead.json \\
        --hosts bench/results/overhead-two-hosts-64-cores.json --plot docs/images/scaling.png

The model has one constant for each part of a step that runs in sequence (`docs/scaling.md`):

    plain calls       a + call * N              the driver sends N calls and reads N results
    flat graph        a + read * N              the driver reads one channel per worker
    dagrl phases      a + read * N              one host: the driver unpickles one message per worker
                      a + join * depth          ... or workers join the results in a tree
                      + level * levels          several hosts: one round trip over a level of links
    chain             a + hop * N               every variant
    array             + array + mib * MiB       cost of an array as input, over a small input; plain calls pay it per worker

All constants are fitted to the medians by least squares of relative errors. The fit leaves out one number of workers, which
checks it, and numbers for which the host has too few cores. `levels` is the depth of the tree of hosts. `level` is the mean
difference between steps over two raylets of one machine and the one-host prediction. An array's cost is its step minus the
step with a small input.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dagrl.bench.report import BenchReport, check_plot, drawing
from dagrl.bench.worker import SMALL
from dagrl.config import ExecutorConfig
from dagrl.runtime.passes.hosts import FAN_OUT

PER_HOST = 32
"""Workers per host in the table, and the largest number fitted: 64 workers and a driver exceed 64 cores."""

BEYOND = (128, 256, 1024, 4096, 16384)

LARGE_MIB = 16.0
"""Input size of the second table."""

REDUCED = "dagrl_compiled, reduced"

MIB = 1 << 20
ARITY = ExecutorConfig().arity


@dataclass(frozen=True)
class LineFit:
    """A fit `a + b N`, or `a + b depth` if a tree joins the results, and its error on the size left out.

    Over several hosts `level_us` is added for each level of links, as measured in `level_rows` rows.
    """

    name: str
    constant_us: float
    each_us: float
    left_out: int
    measured_us: float
    joined: bool = False
    level_us: float = 0.0
    level_rows: int = 0

    @property
    def error(self) -> float:
        """Relative error on the size left out."""
        return self.predict(self.left_out) / self.measured_us - 1

    def predict(self, workers: int) -> float:
        """Returns microseconds per step over hosts of `PER_HOST` workers, with the driver on one of them."""
        links = self.level_us * levels(-(-workers // PER_HOST))
        return self.constant_us + self.each_us * _times(workers, self.joined) + links


@dataclass(frozen=True)
class ArrayCost:
    """Cost of an input of `mib` MiB, at least 1: `array_us + mib_us * mib`, per worker if `for_each_worker`."""

    array_us: float
    mib_us: float
    for_each_worker: bool
    left_out: int
    error: float  # relative, of the step with the largest input on the number of workers left out

    def predict(self, workers: int, mib: float) -> float:
        """Returns microseconds on top of a step with a small input."""
        return (self.array_us + self.mib_us * mib) * (workers if self.for_each_worker else 1)


def levels(hosts: int) -> int:
    """Returns the depth of the tree in which the driver reaches all hosts and each host sends to `FAN_OUT` more."""
    depth, reached, width = 0, 1, 1
    while reached < hosts:
        width *= FAN_OUT
        reached += width
        depth += 1
    return depth


def _times(workers: int, joined: bool) -> int:
    """Returns the line's variable: workers, or levels of a tree that joins `ARITY` results at a time."""
    if not joined:
        return workers
    depth = 0
    while workers > 1:
        workers = -(-workers // ARITY)
        depth += 1
    return depth


def fit_line(report: BenchReport, variant: str, left_out: int, shape: str = "scatter-gather") -> LineFit:
    """Fits a variant's line on one host, from all numbers of workers up to `PER_HOST` except `left_out`."""
    medians, joined = _medians(report, variant, shape), shape == "reduce"
    used = [workers for workers in sorted(medians) if workers != left_out and workers <= PER_HOST]
    values = [medians[n] for n in used]
    constant, each = _least_squares([(1.0, float(_times(n, joined))) for n in used], values, values)
    return LineFit(REDUCED if joined else variant, constant, each, left_out, medians[left_out], joined)


def fit_array(report: BenchReport, variant: str, left_out: int) -> ArrayCost:
    """Fits a variant's cost of arrays as inputs, from the same numbers of workers as its line."""
    for_each = variant == "ray_calls"
    points = [
        (workers, (float(times), mib * times), us - small, us)
        for workers, small in _medians(report, variant).items()
        for times in [workers if for_each else 1]
        for mib, us in _with_arrays(report, variant, workers)
        if workers <= PER_HOST
    ]
    features, added, whole = zip(*[point[1:] for point in points if point[0] != left_out], strict=True)
    array, each = _least_squares(features, added, whole)
    _, (times, copied), more, us = max(point for point in points if point[0] == left_out)
    return ArrayCost(array, each, for_each, left_out, (array * times + each * copied - more) / us)


def fit_hosts(line: LineFit, hosts: BenchReport) -> LineFit:
    """Adds the cost of links between hosts, from that of two hosts."""
    added = [us - line.predict(workers) for workers, us in _medians(hosts, line.name).items()]
    return replace(line, level_us=float(np.mean(added)), level_rows=len(added))


def _medians(report: BenchReport, variant: str, shape: str = "scatter-gather") -> dict[int, float]:
    """Returns the medians of steps with small inputs and results, by number of workers."""
    return {
        row["workers"]: row["p50_us"]
        for row in report.rows
        if (row["variant"], row.get("shape")) == (variant, shape)
        and row["payload_bytes"] == row["result_bytes"] == SMALL
        and row.get("shards", 1) == 1
    }


def _with_arrays(report: BenchReport, variant: str, workers: int) -> list[tuple[float, float]]:
    """Returns (MiB of the input, median) of steps with arrays of at least 1 MiB; smaller ones may travel inside the call."""
    return [
        (row["payload_bytes"] / MIB, row["p50_us"])
        for row in report.rows
        if (row["variant"], row.get("shape"), row["workers"]) == (variant, "scatter-gather", workers)
        and row["payload_bytes"] >= MIB
        and row["result_bytes"] == SMALL
    ]


def _least_squares(
    features: Sequence[tuple[float, float]], values: Sequence[float], measured: Sequence[float]
) -> tuple[float, float]:
    """Fits two non-negative costs to `values`, minimizing errors relative to `measured`."""
    scale: npt.NDArray[np.float64] = 1 / np.array(measured)
    taken, wanted = np.array(features) * scale[:, None], np.array(values) * scale
    first, second = np.linalg.lstsq(taken, wanted, rcond=None)[0]
    if min(first, second) >= 0:
        return float(first), float(second)
    kept = taken[:, int(np.argmax([first, second]))]
    cost = max(0.0, float((kept * wanted).sum() / (kept**2).sum()))
    return (cost, 0.0) if first >= second else (0.0, cost)


def table(models: Sequence[tuple[str, LineFit, ArrayCost]], mib: float = 0.0) -> str:
    """Returns a Markdown table of predictions for more workers, with a small input or an array of `mib` MiB."""
    lines = ["| workers | " + " | ".join(name for name, *_ in models) + " |", "|---" * (len(models) + 1) + "|"]
    for workers in BEYOND:
        steps = [model.predict(workers) + (array.predict(workers, mib) if mib else 0.0) for _, model, array in models]
        lines.append(f"| {workers:,} | " + " | ".join(map(_time, steps)) + " |")
    return "\n".join(lines)


def plot(report: BenchReport, models: Sequence[tuple[str, LineFit, ArrayCost]], path: Path) -> None:
    """Plots measured medians as points and the models as lines up to 16,384 workers."""
    sizes = [2**power for power in range(15)]
    with drawing(path, figsize=(7, 4.5)) as (_, ((panel,),)):
        for name, model, _array in models:
            measured = _medians(report, "dagrl_compiled", "reduce") if name == REDUCED else _medians(report, name)
            (line,) = panel.plot(sizes, [model.predict(size) / 1e3 for size in sizes], label=f"{name}, model")
            panel.scatter(list(measured), [us / 1e3 for us in measured.values()], color=line.get_color(), zorder=3)
        panel.axvline(PER_HOST, color="gray", linewidth=0.6, linestyle=":")
        panel.set(xscale="log", yscale="log", xlabel="workers", ylabel="ms a step")
        panel.set_title("Cost of a step that does nothing (points: measured)")
        panel.grid(alpha=0.3)
        panel.legend()


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e3:.1f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.2f} s"


def main() -> int:
    """Fits, checks and prints the models; plots them if asked to."""
    parser = argparse.ArgumentParser(prog="dagrl.bench.scaling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path, help="JSON of `dagrl bench overhead` on one host")
    parser.add_argument("--hosts", type=Path, required=True, help="JSON of `dagrl bench overhead --hosts 2`")
    parser.add_argument("--left-out", type=int, default=32, help="workers on one host that the fits are checked on")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.plot:
        check_plot(options.plot)
    report, hosts = BenchReport.read(options.report), BenchReport.read(options.hosts)
    print(f"at {options.left_out} workers, left out of the fits:")
    models: list[tuple[str, LineFit, ArrayCost]] = []
    for name in ("ray_calls", "ray_flat_graph", "dagrl_compiled"):
        line, array = fit_line(report, name, options.left_out), fit_array(report, name, options.left_out)
        _tell(line, fit_line(report, name, options.left_out, "chain"), array)
        models.append((name, line, array))
    tree, reduced = fit_hosts(line, hosts), fit_line(report, "dagrl_compiled", options.left_out, "reduce")
    print(f"{reduced.name}: {reduced.constant_us:.0f} + {reduced.each_us:.1f} depth us, {reduced.error:+.0%}")
    print(f"{name} over hosts: {tree.level_us:.0f} us a level of links, from {tree.level_rows} rows, not checked\n")
    models[-1:] = [(name, tree, array), (REDUCED, replace(reduced, level_us=tree.level_us), array)]
    print(f"{table(models)}\n\nwith an input of {LARGE_MIB:.0f} MiB, links as fast as shared memory:\n")
    print(table(models, LARGE_MIB))
    if options.plot:
        plot(report, models, options.plot)
    return 0


def _tell(line: LineFit, chain: LineFit, array: ArrayCost) -> None:
    """Prints a variant's costs and their errors."""
    each = " N" if array.for_each_worker else ""
    print(f"{line.name}: {line.constant_us:.0f} + {line.each_us:.1f} N us, {line.error:+.0%}")
    print(f"  chain: {chain.constant_us:.0f} + {chain.each_us:.1f} N us, {chain.error:+.0%}")
    print(f"  an array: ({array.array_us:.0f} + {array.mib_us:.0f} MiB){each} us, {array.error:+.0%}")


if __name__ == "__main__":
    raise SystemExit(main())
