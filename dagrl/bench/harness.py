"""Measures sides of a comparison in turn, in rounds, until a deadline: the one loop of all benchmarks.

    contest = Contest("echo", {"100 B": {"bytes": 100}}, lambda: nullcontext({"dagrl": ours, "ray": theirs}))
    run(options, [contest])

A side is a function that takes a turn: some steps, and the seconds of each. Every round lets each side take one, in one
order and then in the other, so that a disturbance meets all of them, and ratios are those of turns in the same round. The
rows so far are written after every turn. A side that fails is left out of later rounds, with the reason in the report;
what the deadline does not allow is reported, too. A side that needs a process of its own runs it to its end in each turn
(`execute`).
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from dagrl.bench.report import BenchReport, Row, check_plot, command_line, commit, plot, print_rows, shown
from dagrl.cli.numbers import count, positive
from dagrl.errors import ConfigError, DagrlError, RunError
from dagrl.machine import gpu_count

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
TIME_IS_UP = "the time is up"
KEPT_STEPS = 200
"""Steps of a row up to which the report has each; `--more` needs them."""

TERMINATION_S = 20.0  # how long a late process has to end by itself
LATE = 100  # steps from which a row has their 99th percentile


@dataclass(frozen=True)
class Turn:
    """The seconds of each counted step of a side's turn, and what else it measured (of numbers rows have the median)."""

    seconds: Sequence[float]
    facts: Mapping[str, Any] = field(default_factory=dict)


Take = Callable[[], Mapping[str, Turn]]  # takes a turn, of every case of the contest by its name


@dataclass(frozen=True)
class Contest:
    """Sides that are compared, and the cases that they take in each turn, with the sizes that a row has.

    `open` starts the sides; ratios are relative to the first. Before the first round each takes `warmup` turns that do not
    count.
    """

    name: str
    cases: Mapping[str, Mapping[str, Any]]
    open: Callable[[], AbstractContextManager[Mapping[str, Take]]]
    warmup: int = 0


@dataclass(frozen=True)
class Column:
    """A column of the printed table: its title, the row's key and the format of a number."""

    title: str
    key: str
    format: str = "{:.4g}"


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int = 3) -> None:
    """Adds the options that all benchmarks have."""
    parser.add_argument("--rounds", type=count, default=rounds, help="turns of each side (default: %(default)s)")
    parser.add_argument(
        "--deadline", type=positive, metavar="S", help="skip what would not finish within S seconds, and report it"
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write the rows to this JSON file")
    parser.add_argument("--plot", type=Path, metavar="F", help="plot the rows to this file (png, svg)")
    more = "add rounds to the rows of these files, of equal hardware and versions"
    parser.add_argument("--more", type=Path, nargs="+", default=[], metavar="F", help=more)


def run(
    options: argparse.Namespace,
    contests: Iterable[Contest],
    columns: Sequence[Column] = (),
    finish: Callable[[list[Row]], list[Row]] = list,
    left_out: Mapping[str, str] | None = None,
) -> None:
    """Measures, writes after every turn, and prints. `finish` may add to the rows what needs several of them.

    Raises RunError if nothing was measured, or a side failed.
    """
    if getattr(options, "tiny", None) is False and not gpu_count():
        raise ConfigError("found no GPU; use a host with GPUs, or --tiny for a narrow model on the CPU")
    if options.plot:
        check_plot(options.plot)
    deadline, failed = Deadline(options.deadline), dict[str, str]()
    deadline.left_out |= left_out or {}
    rows: list[Row] = []
    for measured in measure(contests, options.rounds, deadline, failed, earlier_rows(options.more)):
        rows = finish(measured)
        if options.json:
            BenchReport(rows, command_line(), left_out=deadline.left_out, failed=failed).write(options.json)
    print_table(rows, columns)
    for name, reason in [*deadline.left_out.items(), *failed.items()]:
        sys.stderr.write(f"{name}: {reason}\n")
    if options.plot and rows:
        plot(rows, options.plot)
    if failed or not rows:
        raise RunError(f"{len(rows)} rows were measured; failed: {', '.join(failed) or 'none'}; see above")


class Deadline:
    """Allows work for `seconds` from now on (None: no limit). The next item is assumed to take as long as the longest so
    far."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, None if seconds is None else clock() + seconds
        self._begun: float | None = None
        self._longest = 0.0
        self.left_out: dict[str, str] = {}  # reason by name

    def allows(self, name: str) -> bool:
        """Returns whether `name` may start now, and records it as left out if not. Call it when the previous item has
        finished."""
        now = self._clock()
        if self._begun is not None:
            self._longest = max(self._longest, now - self._begun)
        self._begun = now
        allowed = self._end is None or now + self._longest <= self._end
        if not allowed:
            self.left_out[name] = TIME_IS_UP
        return allowed

    def left(self) -> float:
        """Returns the seconds that are left; infinite without a limit."""
        return math.inf if self._end is None else self._end - self._clock()


def measure(
    contests: Iterable[Contest],
    rounds: int,
    deadline: Deadline,
    failed: dict[str, str],
    earlier: Mapping[tuple[str, str], Row] | None = None,
) -> Iterator[list[Row]]:
    """Yields all rows so far after every turn, and at the end. The reasons of sides that fail are added to `failed`."""
    done: list[Row] = []
    for contest in contests:
        if not deadline.allows(contest.name):
            continue
        rows: list[Row] = []
        try:
            with contest.open() as sides:
                for turns in _rounds(contest, sides, rounds, deadline, failed):
                    rows = _rows(contest, turns, earlier or {})
                    yield done + rows
        except Exception:  # of starting the sides; other contests may run
            failed[contest.name] = traceback.format_exc()
            sys.stderr.write(f"{contest.name}: {failed[contest.name]}\n")
        done += rows
    yield done


Turns = Mapping[str, list[Mapping[str, Turn] | None]]
"""What each side did in each round; None where it failed, or has not begun."""


def _rounds(
    contest: Contest, sides: Mapping[str, Take], rounds: int, deadline: Deadline, failed: dict[str, str]
) -> Iterator[Turns]:
    """Yields all turns so far after every turn."""
    turns: dict[str, list[Mapping[str, Turn] | None]] = {side: [] for side in sides}
    for number in range(-contest.warmup, rounds):
        if number > 0 and not deadline.allows(f"{contest.name}, round {number + 1}"):
            return
        for taken in turns.values():
            taken += [None] * (number >= 0)
        for side in list(sides) if number % 2 == 0 else list(reversed(list(sides))):
            turn = _attempt(f"{contest.name}, {side}", sides[side], failed)
            if number >= 0 and turn is not None:
                turns[side][-1] = turn
                yield turns


def _attempt(name: str, take: Take, failed: dict[str, str]) -> Mapping[str, Turn] | None:
    """Returns a side's turn; None if it fails, or has failed before."""
    if name in failed:
        return None
    try:
        return take()
    except Exception as error:
        failed[name] = str(error) if isinstance(error, DagrlError) else traceback.format_exc()
        sys.stderr.write(f"{name}: {failed[name]}\n")
        return None


def _rows(contest: Contest, turns: Turns, earlier: Mapping[tuple[str, str], Row]) -> list[Row]:
    """Returns a row for each case and side."""
    rows = []
    for case, sizes in contest.cases.items():
        base: Row | None = None
        for side, taken in turns.items():
            mine = [None if turn is None else turn[case] for turn in taken if turn is None or case in turn]
            made = [turn for turn in mine if turn is not None]
            if not made:
                continue
            row = {"case": case, "side": side, **sizes, **_facts(made)}
            row |= _times([[] if turn is None else list(turn.seconds) for turn in mine], earlier.get((case, side)), sizes)
            base = base or (row if side == next(iter(turns)) else None)
            rows.append(row | (_ratios(row, base) if base else {}))
    return rows


def _facts(turns: Sequence[Turn]) -> Row:
    """Returns medians of the facts of turns; of lists and texts, the last turn's."""
    last = turns[-1].facts
    numbers = {name for name, value in last.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    return {
        name: _rounded(median(turn.facts[name] for turn in turns if name in turn.facts)) if name in numbers else value
        for name, value in last.items()
    }


def _times(rounds: list[list[float]], earlier: Row | None, sizes: Mapping[str, Any]) -> Row:
    """Returns the median and quartiles of all steps, and the steps or medians of each round, those of `earlier` first."""
    more: Row = {}
    if earlier is not None:
        if "steps_s" not in earlier or any(earlier.get(name) != size for name, size in sizes.items()):
            raise ConfigError(f"--more: {earlier['case']}, {earlier['side']} has other sizes, or no steps; join equal runs")
        rounds = [*earlier["steps_s"], *rounds]
        more = {"commits": [*earlier["commits"], commit()]}
    steps = np.array([second for one in rounds for second in one])
    low, middle, high, late = np.percentile(steps, [25, 50, 75, 99]).tolist()
    found = {"median_s": middle, "low_s": low, "high_s": high} | ({"p99_s": late} if len(steps) >= LATE else {})
    found = {name: _rounded(value) for name, value in found.items()} | {"n": len(steps), "rounds": len(rounds)}
    kept = {"steps_s": [list(map(_rounded, one)) for one in rounds]} if len(steps) <= KEPT_STEPS else {}
    return found | kept | {"rounds_s": [_rounded(median(one)) if one else None for one in rounds]} | more


def _ratios(row: Row, base: Row) -> Row:
    """Returns the time over that of the first side: median, lowest and highest of the rounds that both have.

    One of them may have rounds of an earlier run that the other lacks.
    """
    pairs = zip(reversed(row["rounds_s"]), reversed(base["rounds_s"]), strict=False)
    found = [mine / theirs for mine, theirs in pairs if mine is not None and theirs]
    if row is base or not found:
        return {}
    return {"ratio": _rounded(median(found)), "ratio_low": _rounded(min(found)), "ratio_high": _rounded(max(found))}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}") if math.isfinite(value) else value


def earlier_rows(paths: Sequence[Path]) -> dict[tuple[str, str], Row]:
    """Returns the rows of an earlier run by case and side. Raises ConfigError if it had other hardware or versions."""
    found: dict[tuple[str, str], Row] = {}
    here = BenchReport([], "")
    for path in paths:
        try:
            report = BenchReport.read(path)
            rows = {(row["case"], row["side"]): {"commits": [report.commit], **row} for row in report.rows}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--more {path}: expected rows of this benchmark; {error!r}") from error
        for what in ("hardware", "versions"):
            if (theirs := getattr(report, what)) != (ours := getattr(here, what)):
                raise ConfigError(f"--more {path}: {what}: found {theirs}, expected {ours} as here; measure without --more")
        if twice := found.keys() & rows.keys():
            raise ConfigError(f"--more {path}: {sorted(twice)} are in two files; add them one run after the other")
        found |= rows
    return found


def print_table(rows: Sequence[Row], columns: Sequence[Column] = ()) -> None:
    """Prints a line per row: times with quartiles, and the ratio to the first side of the case."""
    columns = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    late = any("p99_s" in row for row in rows)
    titles = ["case", "side", "median", "quartiles", *(["p99"] if late else []), "n", "ratio", "rounds: low, high"]
    lines, before = [], ""
    for row in rows:
        line = ["" if row["case"] == before else row["case"], row["side"], shown(row["median_s"])]
        line += [
            f"{shown(row['low_s'])}, {shown(row['high_s'])}",
            *([shown(row.get("p99_s"))] if late else []),
            str(row["n"]),
        ]
        spread = f"{row['ratio_low']:.3g}, {row['ratio_high']:.3g}" if "ratio" in row else ""
        line += [f"{row['ratio']:.3g}" if "ratio" in row else "", spread]
        cells = (row.get(column.key) for column in columns)
        line += ["" if cell is None else column.format.format(cell) for cell, column in zip(cells, columns, strict=True)]
        before = row["case"]
        lines.append(line)
    print_rows([*titles, *(column.title for column in columns)], lines)


def execute(
    module: str, order: Mapping[str, Any], limit_s: float = 900.0, variables: Mapping[str, str] | None = None
) -> Any:
    """Runs `python -m module ORDER RESULT` to its end and returns the JSON that it wrote to RESULT.

    Raises RunError with the end of its output if it fails or takes longer than `limit_s`; its session is killed then.
    """
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        run_process([sys.executable, "-m", module, json.dumps(order), str(result)], limit_s, variables)
        return json.loads(result.read_text())


def answer(work: Callable[..., Any]) -> None:
    """The other end of `execute`: calls `work` with the order's values and writes what it returns."""
    Path(sys.argv[2]).write_text(json.dumps(work(**json.loads(sys.argv[1]))))


def run_process(
    command: Sequence[str], limit_s: float, variables: Mapping[str, str] | None = None, log: Path | None = None
) -> None:
    """Runs a command in a session of its own. Raises RunError with the end of its output if it fails or is late.

    The output goes to `log`, if given. A late command first gets SIGTERM; what is left of its group is killed.
    """
    with log.open("w+") if log else tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(  # noqa: S603
            command,
            env=process_environment(variables),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(TERMINATION_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code != 0:
            output.seek(0)
            tail = "".join(output.readlines()[-30:])
            what = f"took longer than {limit_s:.0f} s" if code is None else f"ended with exit code {code}"
            raise RunError(f"{' '.join(command)[:200]} {what}; the end of its output:\n{tail}")


def process_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a process that imports this checkout."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **(variables or {})}


def train_run(config: Path | str, overrides: Sequence[str], limit_s: float = 1800.0) -> list[dict[str, Any]]:
    """Runs `dagrl train` and returns the lines of its `metrics.jsonl`, those of its last stage.

    Checkpoints, plots and TensorBoard are off. Raises RunError if the run fails.
    """
    quiet = ["checkpointing.enabled=false", "checkpointing.export_hf=false"]
    quiet += ["logger.tensorboard_enabled=false", "logger.trace_enabled=false"]
    with tempfile.TemporaryDirectory() as directory:
        own = ["name=bench", f"output_dir={directory}"]
        command = [sys.executable, "-m", "dagrl.cli.main", "train", str(config), *quiet, *overrides, *own]
        run_process(command, limit_s)
        lines = [json.loads(line) for line in (Path(directory) / "bench" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["stage"] == lines[-1]["stage"] and "timing_s/total" in line]


def medians(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Row:
    """Returns the median over steps of each metric that a step has."""
    found = {name: [float(line[name]) for line in lines if line.get(name) is not None] for name in names}
    return {name: median(values) for name, values in found.items() if values}
