"""What a step would cost on more workers than were measured: a cost model, fitted to a benchmark's rows.

    python -m bench.scaling bench/results/overhead-64-cores-quiet.json bench/results/overhead-64-cores-earlier.json \\
        --hosts bench/results/overhead-two-hosts-64-cores.json --plot docs/images/scaling.png

The model has one constant for each thing that happens one after the other in a step (`docs/scaling.md`):

    plain calls       a + call * N              the driver sends N calls and reads N results
    flat graph        a + read * N              the driver reads one channel for each worker
    phases of dagrl   a + part * N              on one host: the driver unpickles one message for each worker
                      + way * levels            on several: what a level of links there and back adds
    a chain           a + hop * N               each way of running it
    an array          + array + mib * MiB       as the input, beside a small one; plain calls copy it for each worker

All are fitted by least squares of the relative errors of the medians without one number of workers, on which they are
checked. `levels` is the depth of the tree of hosts, `way` the mean of what steps over two raylets of one machine cost more
than the line says. An array's cost is what its step took beyond that with a small input in the same report.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.report import Report, check_plot
from bench.worker import SMALL
from dagrl.executors.hosts import FAN_OUT

PER_HOST = 64
"""Workers of one host in the table: as many as were measured."""

BEYOND = (128, 256, 1024, 4096, 16384)

LARGE_MIB = 16.0
"""The input of the second table."""

MIB = 1 << 20


@dataclass(frozen=True)
class Line:
    """`a + b N`: a fit, and how far it is off on the size that it was not fitted on."""

    variant: str
    constant_us: float
    each_us: float
    left_out: int
    measured_us: float

    @property
    def error(self) -> float:
        """Relative error on the size left out."""
        return self.predict(self.left_out) / self.measured_us - 1

    def predict(self, workers: int) -> float:
        """Microseconds a step."""
        return self.constant_us + self.each_us * workers


@dataclass(frozen=True)
class Array:
    """What an input of `mib` MiB adds: `array + mib_us * mib`, of each of the copies that a variant makes."""

    array_us: float
    mib_us: float
    for_each_worker: bool
    left_out: int
    error: float  # of the whole step with the largest input on the number of workers left out, relative

    def predict(self, workers: int, mib: float) -> float:
        """Microseconds beyond a step with a small input."""
        return self.array_us + self.mib_us * mib * (workers if self.for_each_worker else 1)


@dataclass(frozen=True)
class Tree:
    """Phases of dagrl over hosts: what links add to the line of one host."""

    line: Line
    way_us: float  # there and back over one level of links
    rows: int  # that it is the mean of

    def predict(self, workers: int) -> float:
        """Microseconds a step over hosts of `PER_HOST` workers, the driver on one of them."""
        return self.line.predict(workers) + self.way_us * levels(-(-workers // PER_HOST))


def levels(hosts: int) -> int:
    """Depth of the tree in which a driver reaches the other hosts, each of which sends to `FAN_OUT` more."""
    depth, reached, width = 0, 1, 1
    while reached < hosts:
        width *= FAN_OUT
        reached += width
        depth += 1
    return depth


def fit_line(reports: Sequence[Report], variant: str, left_out: int, shape: str = "scatter-gather") -> Line:
    """The line of a variant on one host, from all numbers of workers but `left_out`."""
    medians = _medians(reports, variant, shape)
    used = [workers for workers in sorted(medians) if workers != left_out]
    values = [medians[n] for n in used]
    constant, each = _least_squares([(1.0, float(n)) for n in used], values, values)
    return Line(variant, constant, each, left_out, medians[left_out])


def fit_array(reports: Sequence[Report], variant: str, left_out: int) -> Array:
    """What arrays as inputs add to the steps of a variant on one host, from all numbers of workers but `left_out`."""
    for_each = variant == "ray_calls"
    points = [
        (workers, mib * (workers if for_each else 1), us - small, us)
        for report in reports
        for workers, small in _medians([report], variant).items()
        for mib, us in _with_arrays(report, variant, workers)
    ]
    used = [point for point in points if point[0] != left_out]
    features, added, whole = zip(*[((1.0, copied), more, us) for _, copied, more, us in used], strict=True)
    array, each = _least_squares(features, added, whole)
    _, copied, more, us = max(point for point in points if point[0] == left_out)
    return Array(array, each, for_each, left_out, (array + each * copied - more) / us)


def fit_tree(line: Line, hosts: Report) -> Tree:
    """What two hosts add to the line."""
    added = [us - line.predict(workers) for workers, us in _medians([hosts], line.variant).items()]
    return Tree(line, float(np.mean(added)), len(added))


def _medians(reports: Sequence[Report], variant: str, shape: str = "scatter-gather") -> dict[int, float]:
    """Medians of steps with small inputs and results, by number of workers, each from the first report that has it."""
    found: dict[int, float] = {}
    for report in reports:
        rows = [row for row in report.rows if row["variant"] == variant and row.get("shape") == shape]
        for row in rows:
            if row["payload_bytes"] == row["result_bytes"] == SMALL:
                found.setdefault(int(row["workers"]), float(row["p50_us"]))
    return found


def _with_arrays(report: Report, variant: str, workers: int) -> list[tuple[float, float]]:
    """MiB of the input, and the median, of steps with an array as input and small results."""
    return [
        (float(row["payload_bytes"]) / MIB, float(row["p50_us"]))
        for row in report.rows
        if (row["variant"], row.get("shape"), row["workers"]) == (variant, "scatter-gather", workers)
        and int(row["payload_bytes"]) > SMALL == row["result_bytes"]
    ]


def _least_squares(
    features: Sequence[tuple[float, float]], values: Sequence[float], measured: Sequence[float]
) -> tuple[float, float]:
    """Two costs of at least zero that make up `values`, with the least errors relative to what was measured."""
    scale: npt.NDArray[np.float64] = 1 / np.array(measured)
    taken, wanted = np.array(features) * scale[:, None], np.array(values) * scale
    first, second = np.linalg.lstsq(taken, wanted, rcond=None)[0]
    if min(first, second) >= 0:
        return float(first), float(second)
    kept = taken[:, int(np.argmax([first, second]))]
    cost = max(0.0, float((kept * wanted).sum() / (kept**2).sum()))
    return (cost, 0.0) if first >= second else (0.0, cost)


Model = Line | Tree


def table(models: Sequence[tuple[str, Model, Array]], mib: float = 0.0) -> str:
    """A Markdown table of what the models say for more workers, with a small input or an array of `mib` MiB."""
    lines = ["| workers | " + " | ".join(name for name, *_ in models) + " |", "|---" * (len(models) + 1) + "|"]
    for workers in BEYOND:
        steps = [model.predict(workers) + (array.predict(workers, mib) if mib else 0.0) for _, model, array in models]
        lines.append(f"| {workers:,} | " + " | ".join(map(_time, steps)) + " |")
    return "\n".join(lines)


def plot(reports: Sequence[Report], models: Sequence[tuple[str, Model, Array]], path: Path) -> None:
    """Measured medians as points, the models as lines up to 16,384 workers."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 4.5))
    sizes = [2**power for power in range(15)]
    for name, model, _ in models:
        points = sorted(_medians(reports, name).items())
        (line,) = panel.plot(sizes, [model.predict(size) / 1e3 for size in sizes], label=f"{name}, model")
        panel.scatter([n for n, _ in points], [us / 1e3 for _, us in points], color=line.get_color(), zorder=3)
    panel.axvline(PER_HOST, color="gray", linewidth=0.6, linestyle=":")
    panel.set(xscale="log", yscale="log", xlabel="workers", ylabel="ms a step")
    panel.set_title("Cost of a step that does nothing (points: measured)")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e3:.1f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.2f} s"


def main() -> int:
    """Fit, check, print; draw if asked to."""
    parser = argparse.ArgumentParser(prog="bench.scaling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("reports", type=Path, nargs="+", help="JSON of `dagrl bench overhead` on one host, the best first")
    parser.add_argument("--hosts", type=Path, required=True, help="JSON of `dagrl bench overhead --hosts 2`")
    parser.add_argument("--left-out", type=int, default=32, help="workers on one host that the fits are checked on")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.plot:
        check_plot(options.plot)
    reports = [Report.read(path) for path in options.reports]
    models: list[tuple[str, Model, Array]] = []
    for name in ("ray_calls", "ray_flat_graph", "dagrl_compiled"):
        line, chain = (fit_line(reports, name, options.left_out, shape) for shape in ("scatter-gather", "chain"))
        array = fit_array(reports, name, options.left_out)
        print(f"{name}, at {options.left_out} workers, left out of the fits:")
        print(f"  {line.constant_us:.0f} + {line.each_us:.1f} N us, {line.error:+.0%}")
        print(f"  chain: {chain.constant_us:.0f} + {chain.each_us:.1f} N us, {chain.error:+.0%}")
        each = " N" if array.for_each_worker else ""
        print(f"  an array: {array.array_us:.0f} + {array.mib_us:.0f} MiB{each} us, {array.error:+.0%}")
        models.append((name, line, array))
    tree, array = fit_tree(line, Report.read(options.hosts)), models.pop()[2]
    print(f"{name} over hosts: {tree.way_us:.0f} us a level of links, from {tree.rows} rows, not checked")
    models.append((name, tree, array))
    print(f"{table(models)}\n\nwith an input of {LARGE_MIB:.0f} MiB, links as fast as shared memory:\n")
    print(table(models[1:], LARGE_MIB))  # plain calls with large inputs follow no such line
    if options.plot:
        plot(reports, models, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
