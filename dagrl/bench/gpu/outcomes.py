"""Outcomes of the jobs of `run_all`, stored next to their results in `jobs.json`, and the page generated from them.

Results accumulate over runs into the same directory, also on different days. An outcome replaces the earlier one of its job,
with its files. A job that could not run, had no time, or was stopped replaces nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dagrl.bench.gpu.environment import Environment
from dagrl.bench.gpu.runs import run_tables

JOBS = "jobs.json"
STOPPED = "STOPPED"
FAILURES = ("FAILED", "TOO LONG", STOPPED)
TAKE_NO_PLACE = ("left out", "missing", STOPPED)


@dataclass(frozen=True)
class Outcome:
    """A job's result: `passed`, `FAILED`, `TOO LONG`, `STOPPED`, `left out` or `missing`; its revision and end (UTC)."""

    job: str
    result: str
    seconds: float = 0.0
    note: str = ""
    command: str = ""
    commit: str = ""
    ended: str = ""


def kept(out: Path) -> dict[str, Outcome]:
    """Returns the outcomes of earlier runs in this directory, by job."""
    path = out / JOBS
    return {row["job"]: Outcome(**row) for row in json.loads(path.read_text())} if path.exists() else {}


def own_directory(out: Path) -> Path:
    """Returns `out`, or the next of its name (`-2`, `-3`, ...) that has no README.md or one generated here."""
    directory, number = out, 1
    while (directory / "README.md").exists() and not (directory / JOBS).exists():
        number += 1
        directory = out.with_name(f"{out.name}-{number}")
    return directory


def keep(outcome: Outcome, made: Path, order: Sequence[str], here: Environment, out: Path) -> None:
    """Adds an outcome and its files in `made` to `out`, and regenerates the page, with jobs in the order of `order`."""
    every = kept(out)
    earlier = every.get(outcome.job)
    taken = bool(_files(outcome.job, out)) if earlier is None else earlier.result not in TAKE_NO_PLACE
    if outcome.result not in TAKE_NO_PLACE or not taken:
        every[outcome.job] = outcome
        for path in _files(outcome.job, out):
            path.unlink()
        for path in _files(outcome.job, made):
            shutil.move(path, out / path.name)
    places = {name: place for place, name in enumerate(order)}
    rows = sorted(every.values(), key=lambda row: places.get(row.job, len(places)))
    (out / JOBS).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    (out / "README.md").write_text(page(rows, here, out))


def page(outcomes: Sequence[Outcome], here: Environment, out: Path) -> str:
    """Returns the page of a results directory."""
    lines = [f"# {here.slug}, {out.name}", "", "```", here.text().rstrip(), "```", ""]
    lines += ["| job | result | seconds | | commit | files |", "|---|---|---|---|---|---|"]
    files = {row.job: _files(row.job, out) for row in outcomes}
    for row in outcomes:
        links = " ".join(f"[{path.name.removeprefix(row.job)[1:]}]({path.name})" for path in files[row.job])
        seconds = f"{row.seconds:.0f}" if row.seconds else ""
        lines.append(f"| {row.job} | {row.result} | {seconds} | {row.note} | {row.commit} | {links} |")
    lines += [f"\n![{path.stem}]({path.name})" for row in outcomes for path in files[row.job] if path.suffix == ".png"]
    lines += ["", *run_tables(sorted(out.glob("run-*.metrics.jsonl")))]
    return "\n".join(lines).rstrip() + "\n"


def _files(job: str, directory: Path) -> list[Path]:
    """Returns a job's files: `<job>.json`, `.png`, `.log` and a run's metrics."""
    return sorted(directory.glob(f"{job}.*"))
