"""Draws a committed result: `python -m recipes.gemma3_270m.plot RESULTS.json -o curve.png`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SIDES = {"dagrl": ("dagrl", "#2563eb"), "trl": ("TRL 1.16", "#ea580c")}
PROBLEMS = {"one": "#93c5fd", "two": "#3b82f6", "three": "#1d4ed8", "four": "#1e3a8a"}  # by the number of calculations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    rows = json.loads(options.results.read_text()).get("rows", [])
    held_out = [row for row in rows if row.get("stage") == "stories" and "held_out" in row]
    if not held_out:
        parser.error(
            f"{options.results} has no rows of stories with their held-out rate; expected: some, as in gemma3_270m.json"
        )
    draw(held_out, options.output)


def draw(held_out: Sequence[Mapping[str, Any]], output: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (clock, steps) = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for side, (label, color) in SIDES.items():
        mine = [row for row in held_out if row["side"] == side]
        x = [row["seconds"] for row in mine]
        clock.plot(x, [row["held_out"] for row in mine], "o-", color=color, label=label)
        low, high = zip(*(row["held_out_interval"] for row in mine), strict=True)
        clock.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    clock.set(title="Word problems solved, held out", xlabel="seconds from the launch", xlim=(0, None), ylim=(0, None))
    ours = [row for row in held_out if row["side"] == "dagrl"]
    for name, color in PROBLEMS.items():
        label = f"{name} calculation{'s' if name != 'one' else ''}"
        steps.plot([row["step"] for row in ours], [row[f"held_out/{name}"] for row in ours], "o-", color=color, label=label)
    room = 1.35 * steps.dataLim.ymax  # for the legend
    steps.set(title="By number of calculations (dagrl)", xlabel="step of 512 samples", xlim=(0, None), ylim=(0, room))
    for axes in (clock, steps):
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(output, dpi=130)


if __name__ == "__main__":
    main()
