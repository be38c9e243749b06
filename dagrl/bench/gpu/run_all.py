"""Runs every benchmark and GPU test that this host has GPUs for, and reports what it left out.

    bench/gpu/run_all.sh [--parts environment,tests,refit] [--out DIR] [--limit S] [--list]      (or: make gpu)

Results are written to `bench/results/<hardware>/<date>/`: a JSON file and a plot per benchmark, a log per job, `jobs.json`
and a `README.md` with the table of jobs and the hardware, regenerated after each job. A job that fails or exceeds its limit
(ten minutes, or `--limit`) is reported there, and the next one runs. Later runs into the same directory add their results.
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

from dagrl.bench.deadline import by_reason
from dagrl.bench.gpu.environment import Environment, environment
from dagrl.bench.gpu.outcomes import FAILURES, STOPPED, Outcome, keep, own_directory
from dagrl.bench.gpu.parts import ROOT, Job, jobs

KEPT_OF_A_RUN = ("config.yaml", "metrics.jsonl", "metrics.png")
PLOT_AND_END_S = 50.0
"""Part of a job's limit for the work after a benchmark's deadline: stop workers, print, plot."""

SESSION_S = 10.0  # for a job's processes to end by themselves, and again after they are killed
POLL_S = 0.1
NO_TESTS = 5  # pytest's exit code if no test ran, e.g. in a module that skips itself


def main() -> int:
    """Runs the jobs. Returns the number of failed jobs, or 130 if a job was stopped."""
    options = _arguments()
    here = environment()
    every = jobs(len(here.gpus))
    wanted = [replace(job, limit_s=options.limit or job.limit_s) for job in _wanted(options.parts, every)]
    if options.list:
        for job in wanted:
            print(f"{job.part:20} {job.name:28} {_obstacle(job, here)}")
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
        for job in wanted:
            with _room_of_its_own(out) as room:
                outcomes.append(_survived(job, here, room, Path(models)))
                _tell(outcomes[-1], room)
                keep(outcomes[-1], room, [known.name for known in every], here, out)
                if outcomes[-1].result == STOPPED:
                    return 130
    return sum(outcome.result in FAILURES for outcome in outcomes)


def stop(number: int, frame: object) -> None:
    """Handles SIGTERM like Ctrl-C: the running job ends and its files are kept before this process ends."""
    raise KeyboardInterrupt


@contextmanager
def _room_of_its_own(out: Path) -> Iterator[Path]:
    """Yields a job's own directory next to the results, so that a failed job damages none of them."""
    room = out / "unfinished"
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir()
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", help="parts or jobs (see --list), separated by commas; default: all")
    parser.add_argument("--out", type=Path, help="directory for the results")
    parser.add_argument("--limit", type=_limit, metavar="S", help="limit per job in seconds; default: ten minutes")
    parser.add_argument("--list", action="store_true", help="list the jobs that would run")
    return parser.parse_args()


def _limit(text: str) -> int:
    seconds = int(text)
    if seconds <= PLOT_AND_END_S:
        raise argparse.ArgumentTypeError(
            f"found {seconds} s; use more than the {PLOT_AND_END_S:.0f} s that a job needs to end"
        )
    return seconds


def _require_torch(here: Environment) -> None:
    """Exits if torch does not see all GPUs, because skipped tests prove nothing."""
    if here.torch_gpus < len(here.gpus):
        raise SystemExit(
            f"nvidia-smi shows {len(here.gpus)} GPUs, and torch {here.versions['torch']} of {sys.executable} sees "
            f"{here.torch_gpus}; activate an environment with a CUDA build of torch that fits the driver"
        )


def _wanted(names: str | None, every: Sequence[Job]) -> list[Job]:
    if names is None:
        return list(every)
    asked = names.split(",")
    unknown = [name for name in asked if name != "environment" and not any(name in (p.part, p.name) for p in every)]
    if unknown:
        raise SystemExit(
            f"--parts: found {', '.join(unknown)}; choose from {', '.join(sorted({job.part for job in every}))}"
        )
    return [job for job in every if job.part in asked or job.name in asked]


def _obstacle(job: Job, here: Environment) -> str:
    """Returns why a job cannot run here; empty if it can."""
    if job.part == "tests" and find_spec("pytest") is None:
        return "missing: pytest is not installed (dagrl[dev])"
    if job.gpus > len(here.gpus):
        return f"left out: needs {job.gpus} GPUs, found {len(here.gpus)}"
    cores = len(os.sched_getaffinity(0))
    return f"left out: needs {job.cores} cores, found {cores}" if job.cores > cores else ""


def _survived(job: Job, here: Environment, out: Path, models: Path) -> Outcome:
    """Returns the outcome of `run_job`; an error around the command fails this job alone."""
    try:
        return run_job(job, here, out, models)
    except KeyboardInterrupt:
        return Outcome(job.name, STOPPED, note="stopped on request before the end", commit=here.commit)
    except Exception as error:
        traceback.print_exc()
        return Outcome(job.name, "FAILED", note=f"{type(error).__name__}: {error}", commit=here.commit)


def run_job(job: Job, here: Environment, out: Path, models: Path) -> Outcome:
    """Runs one command in its own session, which ends with it."""
    obstacle = _obstacle(job, here)
    if obstacle:
        result, _, note = obstacle.partition(": ")
        return Outcome(job.name, result, note=note)
    code, seconds = _run_commands(job, out, models)
    result, note = _result(job, code, out)
    note = "; ".join(filter(None, (note, _keep_run(job, out))))
    ended = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return Outcome(job.name, result, round(seconds, 1), note, shlex.join(job.command), here.commit, ended)


def _run_commands(job: Job, out: Path, models: Path) -> tuple[int | None, float]:
    """Returns the exit code of the first failed command or the last one (None: too late), and the seconds of all."""
    started, code = time.monotonic(), None
    with (out / f"{job.name}.log").open("w") as log:
        for command in filter(None, (job.before, job.command)):
            left = job.limit_s - (time.monotonic() - started)
            places = {"out": out, "models": models, "seconds": max(1, int(left - PLOT_AND_END_S))}
            code = _run(_filled(with_what_is_installed(command), places), log, left)
            if code != 0:
                break
    return code, time.monotonic() - started


def with_what_is_installed(command: Sequence[str]) -> list[str]:
    """Returns the command without plots and TensorBoard if their packages are missing; numbers need no extra package."""
    words, draws = list(command), find_spec("matplotlib") is not None
    if "--plot" in words and not draws:
        place = words.index("--plot")
        del words[place : place + 2]
    if "train" in words[1:4] and "dagrl.cli.main" in words:
        words += [] if draws else ["logger.plot_enabled=false"]
        words += [] if find_spec("tensorboard") is not None else ["logger.tensorboard_enabled=false"]
    return words


def _filled(command: Sequence[str], places: Mapping[str, object]) -> list[str]:
    """Replaces `{name}` in a command's words; other braces stay."""
    pattern = re.compile("{(" + "|".join(places) + ")}")
    return [pattern.sub(lambda found: str(places[found[1]]), word) for word in command]


def _run(command: Sequence[str], log: TextIO, limit_s: float) -> int | None:
    """Returns the exit code, or None if the command took too long."""
    log.write(f"$ {shlex.join(command)}\n\n")
    log.flush()
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)  # noqa: S603
    try:
        return process.wait(max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):  # the next job then finds free GPU memory and files without writers
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if left := end_session(process.pid, SESSION_S, SESSION_S):  # children have process groups of their own
            log.write(f"\nprocesses that did not end: {left}\n")


def session_of(leader: int) -> list[int]:
    """Returns the live processes of the session that `leader` opened, even if it has ended (`/proc/<pid>/stat`, proc(5))."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        state, _parent, _group, session = text.rpartition(")")[2].split()[:4]
        if int(session) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


def end_session(leader: int, grace_s: float, kill_s: float) -> list[int]:
    """Waits `grace_s` for a session's processes to end, then kills them. Returns those still alive after `kill_s`."""
    left = _wait(leader, grace_s)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return _wait(leader, kill_s) if left else []


def _wait(leader: int, seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := session_of(leader)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def _result(job: Job, code: int | None, out: Path) -> tuple[str, str]:
    """Returns the result and a note. Tests that were all skipped count as left out."""
    if code is None:
        return "TOO LONG", f"stopped after {job.limit_s} s"
    if code and not (job.part == "tests" and code == NO_TESTS):
        return "FAILED", f"exit code {code}"
    if job.part != "tests":
        return _measured(out / f"{job.name}.json")
    lines = (out / f"{job.name}.log").read_text(errors="replace").splitlines()
    summaries = [line.strip("= ") for line in lines if re.search(r"\d+ (passed|skipped|deselected)", line)]
    counted = summaries[-1] if summaries else "no test ran"
    return ("passed" if re.search(r"\d+ passed", counted) else "left out"), counted


def _measured(path: Path) -> tuple[str, str]:
    """Returns the result of a job's report, with what it left out for lack of time or GPUs."""
    if not path.exists():
        return "passed", ""
    report = json.loads(path.read_text())
    left_out = report.get("left_out", {})
    return ("passed" if report.get("rows") or report.get("cases") or not left_out else "left out"), by_reason(left_out)


def _keep_run(job: Job, out: Path) -> str:
    """Moves a training run's small files to the results. Returns a note on files that could not be deleted."""
    directory = out / "runs" / job.name.removeprefix("run-")
    if job.part != "runs" or not directory.is_dir():
        return ""
    for name in KEPT_OF_A_RUN:
        if (directory / name).exists():
            shutil.move(directory / name, out / f"{job.name}.{name}")
    try:
        shutil.rmtree(out / "runs")
    except OSError as error:
        return f"not removed: {error}"
    return ""


def _tell(outcome: Outcome, out: Path) -> None:
    print(f"{outcome.job:32} {outcome.result:9} {outcome.seconds:6.1f} s  {outcome.note}", flush=True)
    log = out / f"{outcome.job}.log"
    if outcome.result in FAILURES and log.exists():
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join(f"    {line[:300]}" for line in lines[-40:]), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
