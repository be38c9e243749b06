"""The output of the refit benchmark: a table and a plot."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dagrl.bench.report import Row, drawing, hardware, print_rows


class PartTimes:
    """The seconds of each part of a refit, by its name in `annotate`. Parts that contain others include them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measures one range."""
        start = time.perf_counter()
        yield
        if name.startswith("refit: "):
            part = name.removeprefix("refit: ")
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


def label(row: Row) -> str:
    """Returns what a row is about: its case, dtype and method, as far as known."""
    return " ".join(str(row[key]) for key in ("name", "dtype", "method") if key in row) or "the benchmark"


def print_table(rows: Sequence[Row], failed: Mapping[str, str]) -> None:
    """Prints a line per case and method, then the parts of pauses and the errors."""
    columns = "case, dtype, method, GB, ms, p90, GB/s, raw, share, staging MB, pack/wire/unpack ms, pause ms, wrong"
    title = "refit: median and 90th percentile of the slowest rank, GB/s into a rank, share of the raw link"
    print_rows(columns.split(", "), map(_cells, rows), title)
    for row in rows:
        for pause, about in (("pause", ""), ("pause_moved", ", weights in new memory")):
            if parts := row.get(f"{pause}_parts_s"):
                spent = ", ".join(f"{part} {seconds * 1e3:.2f}" for part, seconds in parts.items())
                print(f"pause of {label(row)}{about}, ms: {row[f'{pause}_s'] * 1e3:.2f} = {spent}")
    for name, error in failed.items():
        print(f"{name}: {error}")


def _cells(row: Row) -> list[str]:
    stages = "/".join(f"{row[key] * 1e3:.2f}" for key in ("pack_s", "wire_s", "unpack_s")) if "wire_s" in row else ""
    return [
        row["name"],
        row["dtype"],
        row["method"],
        f"{row['bytes_into_rank'] / 1e9:.3f}",
        f"{row['median_s'] * 1e3:.2f}",
        f"{row['p90_s'] * 1e3:.2f}",
        f"{row['gb_per_s']:.1f}",
        f"{row['raw_gb_per_s']:.1f}" if "raw_gb_per_s" in row else "",
        f"{row['share_of_raw']:.3f}" if "share_of_raw" in row else "",
        f"{row['staging_bytes'] / 1e6:.0f}" if "staging_bytes" in row else "",
        stages,
        f"{row['pause_s'] * 1e3:.2f}" if "pause_s" in row else "",
        str(row["wrong_parameters"]),
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plots milliseconds of every method on a logarithmic axis, one panel per case, with the link's own time as a line."""
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["name"], row["dtype"]), []).append(row)
    every = [row["median_s"] * 1e3 for row in rows]
    size = (8, 0.8 + sum(0.28 * len(some) + 0.55 for some in cases.values()))
    heights = [len(some) + 1 for some in cases.values()]
    with drawing(path, len(cases), figsize=size, sharex=True, height_ratios=heights) as (figure, panels):
        for panel, ((name, dtype), some) in zip(panels[:, 0], cases.items(), strict=True):
            times = [row["median_s"] * 1e3 for row in some]
            colors = ["tab:green" if row["method"].startswith("dagrl") else "tab:gray" for row in some]
            bars = panel.barh([row["method"] for row in some], times, color=colors)
            panel.bar_label(bars, [f"{time:.1f} ms" for time in times], padding=3, fontsize=7)
            raw = next((row for row in some if "raw_gb_per_s" in row), None)
            if raw is not None:
                link_ms = raw["bytes_into_rank"] / raw["raw_gb_per_s"] / 1e6
                panel.axvline(link_ms, color="black", linewidth=0.8, linestyle=":")
            panel.set_xscale("log")
            panel.set_xlim(0.5 * min(every), 2.5 * max(every))
            panel.set_title(f"{name} {dtype}, {some[0]['bytes_into_rank'] / 1e9:.2f} GB per rank", fontsize=8, loc="left")
            panel.tick_params(labelsize=7, which="both")
            panel.invert_yaxis()
        panels[-1, 0].set_xlabel("ms; dotted: the same bytes at the link's raw speed", fontsize=8)
        figure.suptitle(hardware(), fontsize=8)
