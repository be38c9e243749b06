"""One picture of a run, from its `metrics.jsonl`: reward, loss, KL, agreement of the engines, time per phase.

    plot_run(paths.metrics, paths.plot, title="quickstart")

A run shows the panels it has metrics for. Needs matplotlib (the extra `tracking`); draws without a display.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dagrl.errors import DataError
from dagrl.telemetry.metrics import KL, REWARD_MEAN, SPANS, TIMING, VALIDATION
from dagrl.telemetry.record import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]

INK, MUTED, GRID = "#22262e", "#6b7280", "#e5e7eb"
BLUE, ORANGE = "#2563eb", "#ea580c"
PHASE_COLORS = ("#2563eb", "#f59e0b", "#10b981", "#8b5cf6", "#ef4444", "#06b6d4", "#84cc16")
OTHER = "#cbd5e1"
STYLE = {
    "font.size": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@dataclass
class Stage:
    """The steps of one stage (`sft`, `grpo`): every metric as a column, NaN where a step did not have it."""

    name: str
    steps: list[float] = field(default_factory=list)
    columns: dict[str, list[float]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return name in self.columns

    def series(self, name: str) -> tuple[Floats, Floats]:
        """Steps and values of a metric, where it was measured."""
        steps, values = np.array(self.steps), np.array(self.columns[name])
        measured = np.isfinite(values)
        return steps[measured], values[measured]


def plot_run(metrics: Path, picture: Path, title: str) -> None:
    """Draw the metrics of a run into a PNG file. Raises DataError when there are none yet."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = _panels(_read(metrics))
    if not panels:
        raise DataError(f"{metrics} holds no step with a metric to draw; expected at least one line with a loss")
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(
            figsize=(4.6 * columns, 3.1 * rows + 0.5), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
        )
        FigureCanvasAgg(figure)  # not pyplot: its figures live on, and it looks for a display
        figure.suptitle(title, x=0.01, ha="left", color=INK, weight="bold", size=14)
        axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
        for axis, panel in zip(axes, panels, strict=False):
            panel(axis)
            axis.set_xlabel("step")
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        figure.savefig(picture)


def _read(path: Path) -> list[Stage]:
    stages: dict[str, Stage] = {}
    for line in read_metrics(path):
        stage = stages.setdefault(str(line["stage"]), Stage(str(line["stage"])))
        numbers = {name: float(value) for name, value in line.items() if isinstance(value, int | float)}
        for name in numbers.keys() - stage.columns.keys():
            stage.columns[name] = [float("nan")] * len(stage.steps)
        for name, column in stage.columns.items():
            column.append(numbers.get(name, float("nan")))
        stage.steps.append(numbers["step"])
    return list(stages.values())


def _panels(stages: Sequence[Stage]) -> list[Callable[[Axes], None]]:
    """What to draw, in reading order."""
    panels: list[Callable[[Axes], None]] = []
    for name, title in ((REWARD_MEAN, "Reward"), ("loss", "Loss"), (KL, "KL to the reference policy")):
        for stage in stages:
            if stage.has(name) or stage.has(_held_out(name)):
                label = f"{title} ({stage.name.upper()})" if name == "loss" else title
                panels.append(_curve_panel(stage, name, label))
    panels += [_agreement_panel(stage) for stage in stages if stage.has("token_mult_prob_error")]
    if any(stage.has(TIMING + "total") for stage in stages):
        panels.append(lambda axis: _time_panel(axis, stages))
    return panels


def _held_out(name: str) -> str:
    """The same of held-out data: `validation/loss`, `validation/reward`."""
    return VALIDATION + name.removesuffix("/mean")


def _curve_panel(stage: Stage, name: str, title: str) -> Callable[[Axes], None]:
    def draw(axis: Axes) -> None:
        axis.set_title(title)
        if stage.has(name):
            steps, values = stage.series(name)
            window = len(values) // 15
            if window < 3:  # a shorter mean hides nothing and lags behind
                axis.plot(steps, values, color=BLUE, linewidth=1.8, label="train")
            else:
                axis.plot(steps, values, color=BLUE, alpha=0.3, linewidth=1.2)
                axis.plot(steps, _smooth(values, window), color=BLUE, linewidth=2, label=f"train, mean of {window} steps")
        if stage.has(_held_out(name)):
            axis.plot(
                *stage.series(_held_out(name)), color=ORANGE, marker="o", markersize=4.5, linewidth=1.6, label="held out"
            )
        if name == REWARD_MEAN:
            axis.set_ylim(-0.03, max(1.03, axis.get_ylim()[1]))
        if axis.get_legend_handles_labels()[0]:
            axis.legend()

    return draw


def _agreement_panel(stage: Stage) -> Callable[[Axes], None]:
    """How far generation's probabilities are from the train workers', on a logarithmic axis: 0 is full agreement."""

    def draw(axis: Axes) -> None:
        steps, values = stage.series("token_mult_prob_error")
        axis.set_title("Generation against train probabilities")
        axis.plot(steps, np.maximum(values - 1, 1e-9), color=BLUE, linewidth=1.6, label="token_mult_prob_error - 1")
        if stage.has("max_logprob_difference"):
            steps, values = stage.series("max_logprob_difference")
            axis.plot(steps, np.maximum(values, 1e-9), color=ORANGE, linewidth=1.6, label="max_logprob_difference")
        axis.set_yscale("log")
        axis.legend()

    return draw


def _time_panel(axis: Axes, stages: Sequence[Stage]) -> None:
    """Seconds of each step, one band a phase, the costliest at the bottom; what no phase accounts for on top."""
    steps = np.concatenate([np.array(stage.steps) for stage in stages])
    total = _joined(stages, TIMING + "total")
    names = {name for stage in stages for name in stage.columns if name.startswith(TIMING)} - SPANS
    phases = sorted(((name, _joined(stages, name)) for name in names), key=lambda phase: (-phase[1].sum(), phase[0]))
    shown, rest = phases[: len(PHASE_COLORS)], phases[len(PHASE_COLORS) :]
    other = np.maximum(total - sum((seconds for _, seconds in shown), np.zeros_like(total)), 0)
    bands = [
        (name.removeprefix(TIMING), seconds, color) for (name, seconds), color in zip(shown, PHASE_COLORS, strict=False)
    ]
    if rest or other.sum() > 0.01 * total.sum():
        bands.append(("other", other, OTHER))
    bottom = np.zeros_like(total)
    for label, seconds, color in bands:
        axis.bar(steps, seconds, width=1.0, bottom=bottom, color=color, label=label, linewidth=0)
        bottom = bottom + seconds
    axis.set_title("Seconds of each step, by phase")
    axis.set_ylim(0, 1.35 * float(np.percentile(bottom, 98)))  # room for the legend; one slow step may leave the picture
    axis.legend(ncols=3, loc="upper center", handlelength=1.0, columnspacing=1.0)


def _joined(stages: Sequence[Stage], name: str) -> Floats:
    """A metric over all stages, 0 where it was not measured."""
    columns = [np.array(stage.columns.get(name, [0.0] * len(stage.steps))) for stage in stages]
    joined: Floats = np.nan_to_num(np.concatenate(columns))
    return joined


def _smooth(values: Floats, window: int) -> Floats:
    """Mean of the last `window` values, fewer at the start."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    means: Floats = (sums[ends] - sums[starts]) / (ends - starts)
    return means
