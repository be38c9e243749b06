"""Draws one picture of a run from its `metrics.jsonl`: reward, loss, KL, agreement of the engines, time per phase.

    plot_run(paths.metrics, paths.plot, title="quickstart")

A panel is drawn if the run has its metric. Needs matplotlib (extra `tracking`) and no display.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dagrl.errors import DataError
from dagrl.telemetry.metrics import ACCURACY, KL, REWARD_MEAN, SPANS, TIMING, VALIDATION
from dagrl.telemetry.record import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Column = npt.NDArray[np.float64]
Panel = Callable[["Axes"], None]

BLUE, ORANGE, GRAY = "#2563eb", "#ea580c", "#cbd5e1"
PHASE_COLORS = ("#2563eb", "#f59e0b", "#10b981", "#8b5cf6", "#ef4444", "#06b6d4", "#84cc16")
STYLE = {
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@dataclass
class Stage:
    """The steps of one stage (`sft`, `grpo`), each with the numbers of its line."""

    name: str
    lines: list[dict[str, float]] = field(default_factory=list)

    @property
    def metrics(self) -> set[str]:
        """The names of all metrics that a step has."""
        return {name for line in self.lines for name in line}

    def series(self, name: str) -> tuple[Column, Column]:
        """Returns steps and values of a metric where it is finite."""
        found = [(line["step"], line[name]) for line in self.lines if math.isfinite(line.get(name, math.nan))]
        steps, values = np.array(found).reshape(-1, 2).T
        return steps, values


def plot_run(metrics: Path, picture: Path, title: str) -> None:
    """Draws the metrics of a run into a PNG file. Raises DataError if there are none."""
    draw_run(metrics, title).savefig(picture, dpi=150)


def draw_run(metrics: Path, title: str) -> Figure:
    """Returns the figure of a run. Raises DataError if there is nothing to draw."""
    import matplotlib as mpl
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and looks for a display

    panels = _panels(_read(metrics))
    if not panels:
        raise DataError(f"{metrics} has no step with a metric to draw; expected: at least one line with a loss")
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6 * columns, 3.1 * rows + 0.5), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", weight="bold", size=14)
        for number, panel in enumerate(panels, start=1):
            axis = figure.add_subplot(rows, columns, number)
            panel(axis)
            axis.set_xlabel("step")
    return figure


def _read(path: Path) -> list[Stage]:
    stages: dict[str, Stage] = {}
    for line in read_metrics(path):
        stage = stages.setdefault(str(line["stage"]), Stage(str(line["stage"])))
        stage.lines.append({name: float(value) for name, value in line.items() if isinstance(value, int | float)})
    return list(stages.values())


def _panels(stages: Sequence[Stage]) -> list[Panel]:
    """Returns the panels in reading order."""
    panels: list[Panel] = []
    for name, title in (
        (REWARD_MEAN, "Reward"),
        (ACCURACY, "Preference accuracy"),
        ("loss", "Loss"),
        (KL, "KL to the reference policy"),
    ):
        for stage in stages:
            if stage.metrics & {name, _held_out(name)}:
                label = f"{title} ({stage.name.upper()})" if name == "loss" else title
                panels.append(partial(_draw_curve, stage, name, label))
    panels += [partial(_draw_agreement, stage) for stage in stages if "token_mult_prob_error" in stage.metrics]
    if any(TIMING + "total" in stage.metrics for stage in stages):
        panels.append(partial(_draw_times, stages))
    return panels


def _held_out(name: str) -> str:
    """Returns the validation metric of a training metric: `validation/loss`, `validation/reward`."""
    return VALIDATION + name.removesuffix("/mean")


def _draw_curve(stage: Stage, name: str, title: str, axis: Axes) -> None:
    axis.set_title(title)
    if name in stage.metrics:
        steps, values = stage.series(name)
        window = len(values) // 15
        if window < 3:  # a shorter mean smooths nothing
            axis.plot(steps, values, color=BLUE, label="train")
        else:
            axis.plot(steps, values, color=BLUE, alpha=0.3, linewidth=1)
            axis.plot(steps, _trailing_mean(values, window), color=BLUE, label=f"train, mean of {window} steps")
    if _held_out(name) in stage.metrics:
        axis.plot(*stage.series(_held_out(name)), color=ORANGE, marker="o", markersize=4, label="held out")
    if name == REWARD_MEAN:
        axis.set_ylim(-0.03, max(1.03, axis.get_ylim()[1]))
    if axis.get_legend_handles_labels()[0]:
        axis.legend()


def _draw_agreement(stage: Stage, axis: Axes) -> None:
    """Shows how far generation's probabilities are from the train workers', on a logarithmic axis."""
    steps, values = stage.series("token_mult_prob_error")
    axis.set_title("Generation against train probabilities")
    axis.plot(steps, np.maximum(values - 1, 1e-9), color=BLUE, label="token_mult_prob_error - 1")
    if "max_logprob_difference" in stage.metrics:
        steps, values = stage.series("max_logprob_difference")
        axis.plot(steps, np.maximum(values, 1e-9), color=ORANGE, label="max_logprob_difference")
    axis.set_yscale("log")
    axis.legend()


def _draw_times(stages: Sequence[Stage], axis: Axes) -> None:
    """Stacks the seconds of each step by phase, the costliest at the bottom, time outside of phases on top."""
    steps = _joined(stages, "step")
    total = _joined(stages, TIMING + "total")
    names = {name for stage in stages for name in stage.metrics if name.startswith(TIMING)} - SPANS
    phases = sorted(((name, _joined(stages, name)) for name in names), key=lambda phase: (-phase[1].sum(), phase[0]))
    bands = [(name, seconds, color) for (name, seconds), color in zip(phases, PHASE_COLORS, strict=False)]
    other = np.maximum(total - sum((seconds for _, seconds, _ in bands), np.zeros_like(total)), 0)
    if len(phases) > len(bands) or other.sum() > 0.01 * total.sum():
        bands.append(("other", other, GRAY))
    bottom = np.zeros_like(total)
    for name, seconds, color in bands:
        axis.bar(steps, seconds, width=1.0, bottom=bottom, color=color, label=name.removeprefix(TIMING), linewidth=0)
        bottom = bottom + seconds
    axis.set_title("Seconds of each step, by phase")
    axis.set_ylim(0, 1.35 * float(np.percentile(bottom, 98)))  # room for the legend; a slow step may leave the picture
    axis.legend(ncols=3, loc="upper center", handlelength=1.0, columnspacing=1.0)


def _joined(stages: Sequence[Stage], name: str) -> Column:
    """Returns a metric over all stages, 0 where a step does not have it."""
    return np.array([line.get(name, 0.0) for stage in stages for line in stage.lines])


def _trailing_mean(values: Column, window: int) -> Column:
    """Returns the mean of the last `window` values, of fewer at the start."""
    sums = np.convolve(values, np.ones(window))[: len(values)]
    return np.asarray(sums / np.minimum(np.arange(1, len(values) + 1), window), np.float64)
