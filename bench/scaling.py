"""What a step would cost on more workers than were measured: a cost model, fitted to a benchmark's rows.

    python -m bench.scaling bench/results/overhead-64-cores.json ... --plot docs/images/scaling.png

The model has one constant for each thing that happens on the longest path of a step with a small input (`docs/scaling.md`):

    flat graph        a + reads * N                       the driver reads one channel for each worker, one after the other
    phases of dagrl   a + hop * levels(N) + part * parts(N)   each level of the tree is a hop, each node reads its parts

Both are fitted by least squares of the relative errors of the medians, without one size, on which they are checked.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.report import Report, Row
from bench.worker import SMALL
from dagrl.executors.gather import DRIVER_PARTS

ARITY = 8
BEYOND = (128, 256, 1024, 4096, 16384)
Features = Callable[[int], tuple[float, ...]]


def flat_features(workers: int) -> tuple[float, ...]:
    """Constant part, and channels that the driver reads."""
    return 1.0, float(workers)


def tree_features(workers: int) -> tuple[float, ...]:
    """Constant part, hops up the tree, and parts read one after the other along the longest path."""
    if workers <= DRIVER_PARTS:
        return 1.0, 0.0, float(workers)
    levels = math.ceil(math.log(workers, ARITY) - 1e-9)
    return 1.0, float(levels), float(sum(min(ARITY, math.ceil(workers / ARITY**level)) for level in range(levels)))


@dataclass(frozen=True)
class Model:
    """A fit: microseconds for each feature, and how far it is off on the size that it was not fitted on."""

    variant: str
    features: Features
    costs: tuple[float, ...]
    left_out: int
    measured_us: float

    @property
    def error(self) -> float:
        """Relative error on the size left out."""
        return self.predict(self.left_out) / self.measured_us - 1

    def predict(self, workers: int) -> float:
        """Microseconds a step."""
        return float(np.dot(self.features(workers), self.costs))


def merged(reports: Sequence[Report]) -> Report:
    """One report with the rows of each number of workers from the first that has it."""
    rows: list[Row] = []
    for report in reports:
        known = {row["workers"] for row in rows}
        rows += [row for row in report.rows if row["workers"] not in known]
    return Report(rows, reports[0].command, reports[0].hardware, reports[0].versions)


def fit(report: Report, variant: str, features: Features, left_out: int) -> Model:
    """The model of a variant from its rows with small inputs and results on one host, but for `left_out` workers."""
    medians = {
        int(row["workers"]): float(row["p50_us"])
        for row in report.rows
        if row["variant"] == variant and row.get("shape", "scatter-gather") == "scatter-gather" and row["hosts"] == 1
        if row["payload_bytes"] == row["result_bytes"] == SMALL
    }
    used = [workers for workers in sorted(medians) if workers != left_out]
    costs = _positive_least_squares(
        np.array([features(workers) for workers in used]), np.array([medians[workers] for workers in used])
    )
    return Model(variant, features, tuple(costs.tolist()), left_out, medians[left_out])


def _positive_least_squares(features: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Costs of at least zero with the least relative error: a feature whose cost would be negative is left out."""
    kept = list(range(features.shape[1]))
    while True:
        scaled = features[:, kept] / values[:, None]
        solution = np.linalg.lstsq(scaled, np.ones(len(values)), rcond=None)[0]
        if (solution >= 0).all():
            break
        del kept[int(np.argmin(solution))]
    costs = np.zeros(features.shape[1])
    costs[kept] = solution
    return costs


def table(models: Sequence[Model]) -> str:
    """A Markdown table of what the models say for more workers."""
    lines = [
        "| workers | " + " | ".join(model.variant for model in models) + " |",
        "|---" * (len(models) + 1) + "|",
    ]
    for workers in BEYOND:
        lines.append(f"| {workers:,} | " + " | ".join(_time(model.predict(workers)) for model in models) + " |")
    return "\n".join(lines)


def plot(report: Report, models: Sequence[Model], path: Path) -> None:
    """Measured medians as points, the models as lines up to 16,384 workers."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 4.5))
    sizes = [2**power for power in range(15)]
    for model in models:
        rows = [row for row in report.rows if row["variant"] == model.variant and row.get("shape") == "scatter-gather"]
        points = [(int(r["workers"]), float(r["p50_us"])) for r in rows if r["payload_bytes"] == r["result_bytes"] == SMALL]
        (line,) = panel.plot(sizes, [model.predict(size) / 1e3 for size in sizes], label=f"{model.variant}, model")
        panel.scatter(
            [p[0] for p in points], [p[1] / 1e3 for p in points], color=line.get_color(), label="measured", zorder=3
        )
    panel.set(xscale="log", yscale="log", xlabel="workers", ylabel="ms a step", title="Cost of a step that does nothing")
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
    parser.add_argument(
        "reports", type=Path, nargs="+", help="JSON of `dagrl bench overhead`; a size is taken from the first"
    )
    parser.add_argument("--left-out", type=int, default=32, help="workers of the rows that the fit is checked on")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    report = merged([Report.read(path) for path in options.reports])
    models = [
        fit(report, "ray_calls", flat_features, options.left_out),
        fit(report, "ray_flat_graph", flat_features, options.left_out),
        fit(report, "dagrl_compiled", tree_features, options.left_out),
    ]
    for model in models:
        costs = ", ".join(f"{cost:.1f}" for cost in model.costs)
        print(f"{model.variant}: costs {costs} us; {model.error:+.0%} at {model.left_out} workers, left out of the fit")
    print(table(models))
    if options.plot:
        plot(report, models, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
