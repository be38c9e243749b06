"""Runs every measurement and every GPU test that this host has GPUs for, and says what it left out.

    bench/gpu/run_all.sh [--parts environment,tests,refit] [--out DIR] [--limit S] [--list]      (or: make gpu)

Results go to `bench/results/<hardware>/<date>/`: a JSON file and a plot a measurement, the log of every piece, `pieces.json`
and `README.md`, written anew after each piece, with the table of pieces and the hardware. A piece that fails or passes its
limit (ten minutes, or what `--limit` says) is told there, and the next one runs. Parts that run later with the same
directory are added.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from bench.gpu.environment import Environment, environment
from bench.gpu.outcomes import FAILURES, STOPPED, Outcome, keep, own_directory
from bench.gpu.parts import ROOT, Piece, pieces
from bench.gpu.processes import end_session
from dagrl.cli import BENCHES

KEPT_OF_A_RUN = ("config.yaml", "metrics.jsonl", "metrics.png")
PLOT_AND_END_S = 50.0
"""Of a piece's limit, for what a measurement does after its deadline: end its workers, print, plot."""

SESSION_S = 10.0  # for the processes of a piece to end by themselves, and once more when they were killed
NO_TESTS = 5  # pytest's exit code where nothing ran, as in a module that skips itself


def main() -> int:
    """Run; the exit code is the number of pieces that failed, 130 where a piece was stopped."""
    options = _arguments()
    here = environment()
    every = pieces(len(here.gpus))
    wanted = [replace(piece, limit_s=options.limit or piece.limit_s) for piece in _wanted(options.parts, every)]
    if options.list:
        for piece in wanted:
            print(f"{piece.part:20} {piece.name:28} {_obstacle(piece, here)}")
        return 0
    _require_torch(here)
    out = own_directory(options.out or ROOT / "bench" / "results" / here.slug / datetime.now(UTC).strftime("%Y-%m-%d"))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--out {out}: {error.strerror}; name another directory") from error
    (out / "environment.json").write_text(json.dumps(asdict(here), indent=1) + "\n")
    print(f"{here.text()}\nresults: {out}\n", flush=True)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="dagrl-models-") as models:
        for piece in wanted:
            with _room_of_its_own(out) as room:
                outcomes.append(_survived(piece, here, room, Path(models)))
                _tell(outcomes[-1], room)
                keep(outcomes[-1], room, [known.name for known in every], here, out)
                if outcomes[-1].result == STOPPED:
                    return 130
    return sum(outcome.result in FAILURES for outcome in outcomes)


def stop(number: int, frame: object) -> None:
    """SIGTERM is a Ctrl-C: the piece that runs ends, and what it wrote is kept, before this process ends."""
    raise KeyboardInterrupt


@contextmanager
def _room_of_its_own(out: Path) -> Iterator[Path]:
    """A directory for what one piece writes, beside the results, so that a piece that fails spoils none of them."""
    room = out / "unfinished"
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir()
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", help="names of parts or pieces (see --list), separated by commas; all by default")
    parser.add_argument("--out", type=Path, help="another directory for the results")
    parser.add_argument("--limit", type=_limit, metavar="S", help="seconds of each piece, by default its own (ten minutes)")
    parser.add_argument("--list", action="store_true", help="say what would run, and stop")
    return parser.parse_args()


def _limit(text: str) -> int:
    seconds = int(text)
    if seconds <= PLOT_AND_END_S:
        raise argparse.ArgumentTypeError(f"{seconds} s: a measurement needs {PLOT_AND_END_S:.0f} s to end; give it more")
    return seconds


def _require_torch(here: Environment) -> None:
    """Nothing is proved by tests that skip: end where the GPUs are not torch's."""
    if here.torch_gpus < len(here.gpus):
        raise SystemExit(
            f"nvidia-smi shows {len(here.gpus)} GPUs, and torch {here.versions['torch']} of {sys.executable} sees "
            f"{here.torch_gpus}; activate an environment with a CUDA build of torch that fits the driver, and begin again"
        )


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
    if piece.part == "tests" and find_spec("pytest") is None:
        return "missing: pytest is not installed (dagrl[dev])"
    if piece.bench and piece.bench not in BENCHES:
        return f"missing: there is no `dagrl bench {piece.bench}`"
    if piece.gpus > len(here.gpus):
        return f"left out: needs {piece.gpus} GPUs, this host has {len(here.gpus)}"
    cores = len(os.sched_getaffinity(0))
    return f"left out: needs {piece.cores} cores, this host has {cores}" if piece.cores > cores else ""


def _survived(piece: Piece, here: Environment, out: Path, models: Path) -> Outcome:
    """`run_piece`; what goes wrong around a command is a failure of this piece, and the next one runs."""
    try:
        return run_piece(piece, here, out, models)
    except KeyboardInterrupt:
        return Outcome(piece.name, STOPPED, note="ended on request before it was done", commit=here.commit)
    except Exception as error:
        traceback.print_exc()
        return Outcome(piece.name, "FAILED", note=f"{type(error).__name__}: {error}", commit=here.commit)


def run_piece(piece: Piece, here: Environment, out: Path, models: Path) -> Outcome:
    """Run one command in a session of its own, which ends with it."""
    obstacle = _obstacle(piece, here)
    if obstacle:
        result, _, note = obstacle.partition(": ")
        return Outcome(piece.name, result, note=note)
    code, seconds = _run_commands(piece, out, models)
    result, note = _result(piece, code, out)
    note = "; ".join(filter(None, (note, _keep_run(piece, out))))
    ended = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return Outcome(piece.name, result, round(seconds, 1), note, shlex.join(piece.command), here.commit, ended)


def _run_commands(piece: Piece, out: Path, models: Path) -> tuple[int | None, float]:
    """The exit code of the first command that failed, or of the last, None when it took too long; and the seconds of all."""
    started, code = time.monotonic(), None
    with (out / f"{piece.name}.log").open("w") as log:
        for command in filter(None, (piece.before, piece.command)):
            left = piece.limit_s - (time.monotonic() - started)
            places = {"out": out, "models": models, "seconds": max(1, int(left - PLOT_AND_END_S))}
            code = _run(_filled(with_what_is_installed(command), places), log, left)
            if code != 0:
                break
    return code, time.monotonic() - started


def with_what_is_installed(command: Sequence[str]) -> list[str]:
    """A command that draws, and that notes for TensorBoard, only where that can be: numbers need no extra for it."""
    words, draws = list(command), find_spec("matplotlib") is not None
    if "--plot" in words and not draws:
        place = words.index("--plot")
        del words[place : place + 2]
    if "train" in words[1:4] and "dagrl.cli" in words:
        words += [] if draws else ["logger.plot_enabled=false"]
        words += [] if find_spec("tensorboard") is not None else ["logger.tensorboard_enabled=false"]
    return words


def _filled(command: Sequence[str], places: Mapping[str, object]) -> list[str]:
    """The words of a command with `{name}` replaced; other braces stay."""
    pattern = re.compile("{(" + "|".join(places) + ")}")
    return [pattern.sub(lambda found: str(places[found[1]]), word) for word in command]


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
        _end(process, log)


def _end(process: subprocess.Popen[bytes], log: TextIO) -> None:
    """End what the piece left running: its own process group at once, its session when that had time to follow.

    The next piece finds no GPU memory taken, and files that nobody writes to.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if left := end_session(process.pid, SESSION_S, SESSION_S):
        log.write(f"\nprocesses that did not end: {left}\n")


def _result(piece: Piece, code: int | None, out: Path) -> tuple[str, str]:
    """What became of it, and a word on it: tests that all skipped have proved nothing."""
    if code is None:
        return "TOO LONG", f"stopped after {piece.limit_s} s"
    if code and not (piece.part == "tests" and code == NO_TESTS):
        return "FAILED", f"exit code {code}"
    if piece.part != "tests":
        return _measured(out / f"{piece.name}.json")
    counted = _counted(_lines(piece, out))
    return ("passed" if re.search(r"\d+ passed", counted) else "left out"), counted


def _counted(lines: Sequence[str]) -> str:
    """What pytest counted."""
    found = [line.strip("= ") for line in lines if re.search(r"\d+ (passed|skipped|deselected)", line)]
    return found[-1] if found else "no test ran"


def _measured(path: Path) -> tuple[str, str]:
    """Of a piece's report, if it wrote one: what it left out for want of time or GPUs, which may be everything."""
    if not path.exists():
        return "passed", ""
    report = json.loads(path.read_text())
    by_reason: dict[str, list[str]] = {}
    for name, reason in report.get("left_out", {}).items():
        by_reason.setdefault(reason, []).append(name)
    note = "; ".join(f"left out, {reason}: {', '.join(names)}" for reason, names in by_reason.items())
    return ("passed" if report.get("rows") or report.get("cases") or not by_reason else "left out"), note


def _lines(piece: Piece, out: Path) -> list[str]:
    return (out / f"{piece.name}.log").read_text(errors="replace").splitlines()


def _keep_run(piece: Piece, out: Path) -> str:
    """Of a training run, keep what is small; a word on what could not be removed."""
    directory = out / "runs" / piece.name.removeprefix("run-")
    if piece.part != "runs" or not directory.is_dir():
        return ""
    for name in KEPT_OF_A_RUN:
        if (directory / name).exists():
            shutil.move(directory / name, out / f"{piece.name}.{name}")
    try:
        shutil.rmtree(out / "runs")
    except OSError as error:
        return f"not removed: {error}"
    return ""


def _tell(outcome: Outcome, out: Path) -> None:
    print(f"{outcome.piece:32} {outcome.result:9} {outcome.seconds:6.1f} s  {outcome.note}", flush=True)
    log = out / f"{outcome.piece}.log"
    if outcome.result in FAILURES and log.exists():
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join(f"    {line[:300]}" for line in lines[-40:]), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
