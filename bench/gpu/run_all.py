"""Runs every measurement and every GPU test that this host has GPUs for, and says what it left out.

    bench/gpu/run_all.sh [--parts environment,tests,refit] [--out DIR] [--list]      (or: make gpu)

Results go to `bench/results/<hardware>/<date>/`: a JSON file and a plot a measurement, the log of every piece, and
`README.md`, written anew after each piece, with the table of pieces and the hardware. A piece that fails or passes its limit
of ten minutes is told there, and the next one runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from bench.gpu.environment import Environment, environment
from bench.gpu.parts import ROOT, Piece, pieces
from bench.gpu.runs import run_table
from dagrl.cli import BENCHES

KEPT_OF_A_RUN = ("config.yaml", "metrics.jsonl", "metrics.png")


@dataclass(frozen=True)
class Outcome:
    """What became of a piece: `passed`, `FAILED`, `TOO LONG`, `left out`, `missing`."""

    piece: Piece
    result: str
    seconds: float = 0.0
    note: str = ""


def main() -> int:
    """Run; the exit code is the number of pieces that failed."""
    options = _arguments()
    here = environment()
    wanted = _wanted(options.parts, pieces(len(here.gpus)))
    if options.list:
        for piece in wanted:
            print(f"{piece.part:20} {piece.name:28} {_obstacle(piece, here)}")
        return 0
    out = options.out or ROOT / "bench" / "results" / here.slug / datetime.now(UTC).strftime("%Y-%m-%d")
    out.mkdir(parents=True, exist_ok=True)
    (out / "environment.txt").write_text(here.text())
    print(f"{here.text()}\nresults: {out}\n", flush=True)
    outcomes: list[Outcome] = []
    for piece in wanted:
        outcomes.append(run_piece(piece, here, out))
        _tell(outcomes[-1], out)
        (out / "README.md").write_text(summary(outcomes, here, out))
    return sum(outcome.result in ("FAILED", "TOO LONG") for outcome in outcomes)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", help="names of parts or pieces (see --list), separated by commas; all by default")
    parser.add_argument("--out", type=Path, help="another directory for the results")
    parser.add_argument("--list", action="store_true", help="say what would run, and stop")
    return parser.parse_args()


def _wanted(names: str | None, every: Sequence[Piece]) -> list[Piece]:
    if names is None:
        return list(every)
    asked = names.split(",")
    unknown = [name for name in asked if name != "environment" and not any(name in (p.part, p.name) for p in every)]
    if unknown:
        raise SystemExit(f"there are no parts {unknown}; there are {sorted({piece.part for piece in every})}")
    return [piece for piece in every if piece.part in asked or piece.name in asked]


def _obstacle(piece: Piece, here: Environment) -> str:
    """Why a piece cannot run here; empty when it can."""
    if piece.bench and piece.bench not in BENCHES:
        return f"missing: there is no `dagrl bench {piece.bench}`"
    if piece.gpus > len(here.gpus):
        return f"left out: needs {piece.gpus} GPUs, this host has {len(here.gpus)}"
    cores = len(os.sched_getaffinity(0))
    return f"left out: needs {piece.cores} cores, this host has {cores}" if piece.cores > cores else ""


def run_piece(piece: Piece, here: Environment, out: Path) -> Outcome:
    """Run one command in a process group of its own, which ends with it."""
    obstacle = _obstacle(piece, here)
    if obstacle:
        result, _, note = obstacle.partition(": ")
        return Outcome(piece, result, note=note)
    started = time.monotonic()
    with (out / f"{piece.name}.log").open("w") as log:
        for command in filter(None, (piece.before, piece.command)):
            words = [word.replace("{out}", str(out)) for word in command]
            code = _run(words, log, piece.limit_s - (time.monotonic() - started))
            if code != 0:
                break
    seconds = time.monotonic() - started
    _keep_run(piece, out)
    if code is None:
        return Outcome(piece, "TOO LONG", seconds, f"stopped after {piece.limit_s} s")
    return Outcome(piece, "FAILED" if code else "passed", seconds, f"exit code {code}" if code else _count(piece, out))


def _run(command: Sequence[str], log: TextIO, limit_s: float) -> int | None:
    """The exit code, or None when it took too long."""
    log.write(f"$ {shlex.join(command)}\n\n")
    log.flush()
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)  # noqa: S603
    try:
        return process.wait(max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what the piece left running in its own process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _keep_run(piece: Piece, out: Path) -> None:
    """Of a training run, keep what is small."""
    directory = out / "runs" / piece.name.removeprefix("run-")
    if piece.part != "runs" or not directory.is_dir():
        return
    for name in KEPT_OF_A_RUN:
        if (directory / name).exists():
            shutil.move(directory / name, out / f"{piece.name}.{name}")
    shutil.rmtree(out / "runs")


def _count(piece: Piece, out: Path) -> str:
    """What pytest counted."""
    lines = (out / f"{piece.name}.log").read_text(errors="replace").splitlines() if piece.part == "tests" else []
    found = [line.strip("= ") for line in lines if re.search(r"\d+ (passed|skipped)", line)]
    return found[-1] if found else ""


def _tell(outcome: Outcome, out: Path) -> None:
    print(f"{outcome.piece.name:32} {outcome.result:9} {outcome.seconds:6.1f} s  {outcome.note}", flush=True)
    if outcome.result in ("FAILED", "TOO LONG"):
        lines = (out / f"{outcome.piece.name}.log").read_text(errors="replace").splitlines()
        print("\n".join(f"    {line[:300]}" for line in lines[-40:]), flush=True)


def summary(outcomes: Sequence[Outcome], here: Environment, out: Path) -> str:
    """The page of a run."""
    lines = [f"# {here.slug}, {datetime.now(UTC):%Y-%m-%d}", "", "```", here.text().rstrip(), "```", ""]
    lines += ["| piece | result | seconds | | files |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        files = " ".join(f"[{path.suffix[1:]}]({path.name})" for path in sorted(out.glob(f"{outcome.piece.name}.*")))
        seconds = f"{outcome.seconds:.0f}" if outcome.seconds else ""
        lines.append(f"| {outcome.piece.name} | {outcome.result} | {seconds} | {outcome.note} | {files} |")
    lines += ["", *run_table(sorted(out.glob("run-*.metrics.jsonl")))]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
