"""Seconds from the SIGKILL of a worker to the end of the next training step, and the steps that are repeated.

    python -m tests.chaos.recovery --kills 5 --json F [a.b=c ...]

GRPO quickstarts, synchronous and with updates in flight. In each, a train worker and a generation worker are killed in turn,
at random moments, `--kills` of each. `PYTHONPATH` decides whose dagrl is measured.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random

from dagrl.bench.report import commit, hardware
from tests.integration.main_job import GRPO, Run, running

WORKERS = {"train worker": "ray::Megatron", "generation worker": "ray::Vllm"}
COMMON = (
    *("on_failure=restart", "max_restarts=1000"),
    "sft.max_num_steps=0",
    *("grpo.max_num_steps=100000", "grpo.val_period=0", "grpo.val_at_start=false"),
    *("checkpointing.save_period=5", "checkpointing.keep_last_k=2"),
    *("logger.tensorboard_enabled=false", "logger.log_level=INFO"),
)
LOOPS = {
    "sync": (),
    "async": (
        "grpo.async_grpo={enabled: true, in_flight_weight_updates: true, max_trajectory_age_steps: 2}",
        "loss_fn.use_importance_sampling_correction=true",
    ),
}
STEADY_STEPS = 3
"""Steps between two kills, at least."""

RANDOM = Random(0)  # noqa: S311  # not cryptography


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--kills", type=int, default=5, help="of each role in each loop; default: %(default)s")
    parser.add_argument("--loop", action="append", choices=LOOPS, help="only this one; repeatable")
    parser.add_argument("--json", type=Path)
    options = parser.parse_intermixed_args()
    rows: list[dict[str, object]] = []
    loops = options.loop or list(LOOPS)
    for loop in loops:
        arguments = (*COMMON, *LOOPS[loop], *options.overrides)
        with tempfile.TemporaryDirectory() as directory, running(GRPO, Path(directory), "run", *arguments) as run:
            for role in list(WORKERS) * options.kills:
                rows.append({"loop": loop, **kill(run, role)})
                sys.stdout.write(json.dumps(rows[-1]) + "\n")
                sys.stdout.flush()
    medians = {
        f"{loop}, {role}": statistics.median(back_s(row) for row in rows if (row["loop"], row["role"]) == (loop, role))
        for loop in loops
        for role in WORKERS
    }
    sys.stdout.write(json.dumps(medians, indent=1) + "\n")
    if options.json:
        command = " ".join(["python -m tests.chaos.recovery", *sys.argv[1:]])
        content = {"command": command, "hardware": hardware(), "commit": commit(), "median_s": medians, "kills": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


def back_s(row: Mapping[str, object]) -> float:
    return float(str(row["back_s"]))


def kill(run: Run, role: str) -> dict[str, object]:
    """Kills a worker some steps after the last kill. Returns when the next step ended, and how many steps it repeats."""
    steady = last_step(run) + STEADY_STEPS
    run.wait_until(lambda: last_step(run) >= steady, f"step {steady}")
    time.sleep(RANDOM.uniform(0.0, 1.0))
    pid = run.pids(WORKERS[role])[0]
    before, killed = last_step(run), time.time()
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)  # a step that was ending

    def later() -> list[dict[str, object]]:
        return [line for line in run.metrics if "loss" in line and float(line["time"]) > killed + 0.5]

    run.wait_until(lambda: bool(later()), f"a step after the SIGKILL of a {role}")
    first = later()[0]
    repeated = max(0, before - int(str(first["step"])) + 1)
    return {"role": role, "back_s": round(float(str(first["time"])) - killed, 2), "repeated_steps": repeated}


def last_step(run: Run) -> int:
    return max((int(line["step"]) for line in run.metrics if "loss" in line), default=0)


if __name__ == "__main__":
    main()
