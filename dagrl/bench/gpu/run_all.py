"""Runs the GPU tests, benchmarks and training runs that this host has GPUs for: `make gpu`.

    python -m dagrl.bench.gpu.run_all [--parts tests,refit] [--out DIR] [--limit S] [--list]

Results are written to `dagrl/bench/results/<hardware>/<date>/`: a JSON file for each benchmark, the metrics of each run, a
log for each job, and `jobs.json` and `README.md` with all jobs, after each job. A job that fails, exceeds its limit or needs
more GPUs is reported there, and the next one runs. Later runs on the same day replace the jobs that they run.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from dagrl.bench.gpu.jobs import Job, jobs
from dagrl.bench.harness import ROOT, run_process
from dagrl.bench.report import commit, hardware, output_of, versions
from dagrl.cli.numbers import count
from dagrl.errors import RunError
from dagrl.machine import gpus

LIMIT_S = 560  # per job: it fits into ten minutes with the start of `run_all` and the end of processes that the job leaves
END_S = 60  # part of a job's limit for the work after a benchmark's deadline: stop workers, write, print


@dataclass(frozen=True)
class Outcome:
    """A job's result: `passed`, `FAILED` or `left out`."""

    job: str
    result: str
    note: str = ""
    seconds: float = 0.0
    command: str = ""
    commit: str = ""
    ended: str = ""


def main() -> int:
    """Runs the jobs. Returns the number of failed jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", help="parts or jobs (see --list), separated by commas; default: all")
    parser.add_argument("--out", type=Path, help="directory for the results")
    parser.add_argument("--limit", type=count, default=LIMIT_S, metavar="S", help="per job (default: %(default)s s)")
    parser.add_argument("--list", action="store_true", help="list the jobs that would run")
    options = parser.parse_args()
    cards = gpus()
    wanted = chosen(options.parts, jobs(len(cards)))
    if options.list:
        for job in wanted:
            print(f"{job.part:10} {job.name:28} {obstacle(job, len(cards))}")
        return 0
    slug = re.sub(r"[^a-z0-9]+", "-", f"{len(cards)}x-{cards[0].name}".lower()).strip("-") if cards else "no-gpu"
    out = options.out or ROOT / "dagrl" / "bench" / "results" / slug / datetime.now(UTC).strftime("%Y-%m-%d")
    out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for job in wanted:
        reason = obstacle(job, len(cards))
        outcomes.append(Outcome(job.name, "left out", reason) if reason else run_job(job, out, options.limit))
        print(f"{job.name:32} {outcomes[-1].result:9} {outcomes[-1].seconds:6.1f} s  {outcomes[-1].note}", flush=True)
        keep(outcomes[-1], out)
    return sum(outcome.result == "FAILED" for outcome in outcomes)


def chosen(names: str | None, every: Sequence[Job]) -> list[Job]:
    """Returns the jobs of `--parts`. Raises SystemExit for an unknown name."""
    asked = names.split(",") if names else []
    if unknown := [name for name in asked if not any(name in (job.part, job.name) for job in every)]:
        raise SystemExit(
            f"--parts: found {', '.join(unknown)}; choose from {', '.join(sorted({job.part for job in every}))}"
        )
    return [job for job in every if not asked or job.part in asked or job.name in asked]


def obstacle(job: Job, cards: int) -> str:
    """Returns why a job cannot run here; empty if it can."""
    if job.gpus > cards:
        return f"needs {job.gpus} GPUs, found {cards}"
    cores = len(os.sched_getaffinity(0))
    return f"needs {job.cores} cores, found {cores}" if job.cores > cores else ""


def run_job(job: Job, out: Path, limit_s: float) -> Outcome:
    """Runs one command; its output goes to a log."""
    places = {"{out}": str(out), "{seconds}": str(max(1, int(limit_s - END_S)))}
    command = [re.sub("{(out|seconds)}", lambda found: places[found[0]], word) for word in job.command]
    log, started, note = out / f"{job.name}.log", time.monotonic(), ""
    try:
        run_process(command, limit_s, log=log)
    except RunError as error:
        note = str(error).partition("; the end of its output")[0][len(" ".join(command)[:200]) :].strip()
    if job.part == "runs":
        note = "; ".join(filter(None, (note, keep_run(job, out))))
    counted = re.findall(r"(?:\d+ \w+, )*\d+ (?:passed|skipped).*?(?= =|$)", log.read_text(errors="replace"), re.M)
    result = "FAILED" if "ended with" in note or "longer than" in note else "passed"
    if job.part == "tests" and counted:
        note = "; ".join(filter(None, (note, counted[-1])))
        result = result if "passed" in counted[-1] or (result == "FAILED" and "skipped" not in counted[-1]) else "left out"
    ended = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    seconds = round(time.monotonic() - started, 1)
    return Outcome(job.name, result, note, seconds, shlex.join(job.command), commit(), ended)


def keep_run(job: Job, out: Path) -> str:
    """Moves a training run's metrics to the results. Returns how many steps they have."""
    directory, path = out / "runs" / job.name.removeprefix("run-"), out / f"{job.name}.metrics.jsonl"
    if not (directory / "metrics.jsonl").exists():
        return "no metrics"
    shutil.move(directory / "metrics.jsonl", path)
    shutil.rmtree(out / "runs", ignore_errors=True)
    return f"{sum('timing_s/total' in json.loads(line) for line in path.read_text().splitlines())} steps"


def keep(outcome: Outcome, out: Path) -> None:
    """Adds an outcome to `jobs.json`, and writes the page of the directory. Jobs that were left out replace nothing."""
    path = out / "jobs.json"
    every: dict[str, Mapping[str, object]] = json.loads(path.read_text()) if path.exists() else {}
    if outcome.result != "left out" or outcome.job not in every:
        every[outcome.job] = asdict(outcome)
    path.write_text(json.dumps(every, indent=1) + "\n")
    lines = [f"# {out.parent.name}, {out.name}", "", f"{hardware()}; commit {commit()}", ""]
    lines += [f"- {name} {version}" for name, version in versions().items()]
    lines += [f"- {name}={value}" for name, value in sorted(os.environ.items()) if _RECORDED.match(name)]
    lines += ["", "```", re.sub(r"\x1b\[[0-9;]*m", "", output_of("nvidia-smi", "topo", "-m")), "```", ""]
    lines += ["| job | result | seconds | | commit | files |", "|---|---|---|---|---|---|"]
    for name, row in every.items():
        files = " ".join(f"[{file.name.removeprefix(name)[1:]}]({file.name})" for file in sorted(out.glob(f"{name}.*")))
        lines.append(f"| {name} | {row['result']} | {row['seconds']} | {row['note']} | {row['commit']} | {files} |")
    (out / "README.md").write_text("\n".join(lines) + "\n")


_RECORDED = re.compile(r"(NCCL|CUDA_VISIBLE|CUDA_DEVICE_MAX|VLLM|RAY|TORCH_SYMM|NVSHMEM)_(?!.*(TOKEN|KEY|SECRET|PASSWORD))")
"""Variables to record: those that affect a measurement, never secrets."""


if __name__ == "__main__":
    sys.exit(main())
