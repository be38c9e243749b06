"""The table of training runs: what each learned, how far its engines agreed, how fast it went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dagrl.record import read_metrics

HEAD = ("run", "steps", "first loss", "last loss", "first reward", "last reward", "KL between engines: median", "largest")
TIMES = ("step s", "tokens/s/GPU", "idle train", "idle generation", "refit ms")
SETTLED = 2
"""Steps left out of the times at the beginning of a run."""


def run_table(paths: Sequence[Path]) -> list[str]:
    """Lines of Markdown; none without runs."""
    rows = [row for row in map(_row, paths) if row]
    if not rows:
        return []
    names = (*HEAD, *TIMES)
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", *(f"| {' | '.join(row)} |" for row in rows)]


def _row(path: Path) -> list[str]:
    steps = [line for line in read_metrics(path) if line["stage"] == "grpo" and "loss" in line]
    if not steps:
        return []
    kls = [float(step["gen_kl_error"] or 0.0) for step in steps]
    losses, rewards = (_ends(steps, name) for name in ("loss", "reward/mean"))
    settled = steps[SETTLED:] or steps
    return [
        path.name.removeprefix("run-").partition(".")[0],
        str(len(steps)),
        *(f"{value:.4f}" for value in (*losses, *rewards)),
        f"{median(kls):.1e}",
        f"{max(kls):.1e}",
        f"{_median(settled, 'timing_s/total'):.3f}",
        f"{_median(settled, 'perf/tokens_per_sec_per_gpu'):,.0f}",
        f"{_median(settled, 'idle/train'):.0%}",
        f"{_median(settled, 'idle/generation'):.0%}",
        f"{1e3 * _median(settled, 'timing_s/refit'):.1f}",
    ]


def _ends(steps: Sequence[Any], name: str) -> tuple[float, float]:
    return float(steps[0][name]), float(steps[-1][name])


def _median(steps: Sequence[Any], name: str) -> float:
    return median(float(step.get(name) or 0.0) for step in steps)
