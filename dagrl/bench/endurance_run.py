"""Endurance of a whole run: memory, descriptors, threads and step time of the GRPO quickstart over thousands of steps.

    python -m dagrl.bench.endurance_run --steps 2000 --json bench/results/2-cores/2026-11-25/endurance-run.json

Runs `dagrl train` and looks at the driver and all its descendants (Ray, workers, the reward's process) after each tenth of
the steps; by the first look, caches are full. `first_step_s` and `last_step_s` are the medians of the second and of the last
tenth; steps that validate or save are left out. Other load changes these times; the processor time is less sensitive to it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from dagrl.bench.report import Row, add_outputs, write_result
from dagrl.machine import DEV_SHM, descendants_of
from dagrl.telemetry.record import read_metrics

ROOT = Path(__file__).parents[1]
CONFIG = "examples/grpo_quickstart.yaml"
POLL_S = 0.5
TENTHS = 10


def measure(steps: int, overrides: Sequence[str]) -> Row:
    """Runs the quickstart without its SFT phase for `steps` steps. Raises RuntimeError with the output if it fails."""
    with tempfile.TemporaryDirectory() as output, Path(output, "shown").open("w+") as shown:
        own = (f"output_dir={output}", "name=run", "sft.max_num_steps=0", f"grpo.max_num_steps={steps}")
        command = [str(Path(sys.executable).with_name("dagrl")), "train", str(ROOT / CONFIG), *own, *QUIET, *overrides]
        began = time.monotonic()
        with subprocess.Popen(command, stdout=shown, stderr=subprocess.STDOUT) as process:  # noqa: S603
            metrics = Path(output, "run", "metrics.jsonl")
            looks = list(_looks(process, metrics, steps))
        if process.returncode:
            shown.seek(0)
            raise RuntimeError(shown.read()[-3000:])
        durations = _durations(metrics)
        tenth = max(1, steps // TENTHS)
        first, last = float(np.median(durations[tenth : 2 * tenth])), float(np.median(durations[-tenth:]))
        return {
            "steps": steps,
            "seconds": round(time.monotonic() - began, 1),
            "first_step_s": round(first, 4),
            "last_step_s": round(last, 4),
            "looks": looks,
        }


QUIET = (
    "grpo.val_period=0",
    "checkpointing.save_period=500",
    "checkpointing.keep_last_k=1",
    "logger.plot_enabled=false",
    "logger.log_level=WARNING",
)


def _looks(process: subprocess.Popen[bytes], metrics: Path, steps: int) -> Iterator[Row]:
    tenth = max(1, steps // TENTHS)
    due = tenth
    while process.poll() is None:
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if step >= due:
            yield _look(process.pid, step)
            due = (step // tenth + 1) * tenth
        time.sleep(POLL_S)


def _look(driver: int, step: int) -> Row:
    """Returns what all processes of the run hold at a step, with their processor time since their start.

    `resident_mb` is their own memory by name, without what is shared or mapped; `shared_mb` is in `/dev/shm`.
    """
    resident: Counter[str] = Counter()
    descriptors = threads = ticks = count = 0
    for place in [Path(f"/proc/{pid}") for pid in (driver, *descendants_of(driver))]:
        with suppress(OSError):  # it has ended meanwhile
            lines = (place / "status").read_text().splitlines()
            status = dict(line.split(":", 1) for line in lines if ":" in line)
            resident[_name(place)] += int(status["RssAnon"].split()[0])
            threads += int(status["Threads"])
            descriptors += len(os.listdir(place / "fd"))
            ticks += sum(map(int, (place / "stat").read_text().rpartition(")")[2].split()[11:13]))  # proc(5): utime, stime
            count += 1
    usage = os.statvfs(DEV_SHM)
    shared = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
    return {
        "step": step,
        "processes": count,
        "cpu_s": ticks / os.sysconf("SC_CLK_TCK"),
        "resident_mb": {name: round(kilobytes / 1e3, 1) for name, kilobytes in sorted(resident.items())},
        "descriptors": descriptors,
        "threads": threads,
        "shared_mb": round(shared / 1e6, 1),
    }


def _name(place: Path) -> str:
    """Returns a process's program, or the module or file that Python runs in it."""
    words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
    if words[0].startswith("ray::"):
        return words[0].partition(".")[0]
    program = Path(words[0]).name
    named = [word for word in words[1:] if program.startswith("python") and not word.startswith("-")]
    return Path(named[0]).name if named else program


def _durations(metrics: Path) -> list[float]:
    """Seconds of each step that neither validates nor saves."""
    lines = [line for line in read_metrics(metrics) if "loss" in line]
    plain = [not any(str(name).startswith(("validation/", "timing_s/checkpoint")) for name in line) for line in lines]
    times = [float(line["time"] or 0.0) for line in lines]
    return [float(gap) for gap, kept in zip(np.diff(times), plain[1:], strict=True) if kept]


def main() -> int:
    parser = argparse.ArgumentParser(prog="dagrl.bench.endurance_run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    add_outputs(parser, plot=False)
    parser.add_argument("overrides", nargs="*", help="further overrides of the configuration")
    options = parser.parse_args()
    found = measure(options.steps, options.overrides)
    print(json.dumps(found, indent=1))
    write_result(options.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
