"""How long a background checkpoint holds training up: `dagrl bench train --checkpoints DIR`.

A checkpoint is asked for between two steps, as in a run with `checkpointing.async_save`. Steps go on while it is written,
and it is completed after the step in which the last file was written. Its stall is the time of all that less that of as many
steps without a checkpoint, in seconds and in steps. The first one also allocates the host memory that later ones use.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.bench.report import Row
from dagrl.errors import RunError
from dagrl.runtime.deadline import Deadline

if TYPE_CHECKING:
    from dagrl.bench.train_rivals import DagrlSteps

SAVES, MOST_STEPS, DEADLINE_S = 2, 200, 300.0


def checkpoint_stalls(ours: DagrlSteps, step_s: float, directory: Path) -> list[Row]:
    """Saves checkpoints below `directory` and removes them. `step_s`: a step without a checkpoint."""
    found = []
    for number in range(SAVES):
        path = directory / f"checkpoint-{number}"
        try:
            found.append(_one(ours, step_s, path))
        finally:
            shutil.rmtree(path, ignore_errors=True)
    return found


def _one(ours: DagrlSteps, step_s: float, path: Path) -> Row:
    """Returns a checkpoint's bytes, the copy to the host, the steps until it is written, its completion, and its stall."""
    started, deadline = time.perf_counter(), Deadline(DEADLINE_S, "bench.train_checkpoint.DEADLINE_S")
    ours.group.call("save_checkpoint", str(path), True, deadline=deadline)
    copied, steps = time.perf_counter(), 0
    while not all(ours.group.call("checkpoint_written")):
        if steps == MOST_STEPS or time.perf_counter() - started > DEADLINE_S:
            raise RunError(f"{path} is not written after {steps} steps; is the disk slow?")
        steps += len(ours.take(1))
    written = time.perf_counter()
    ours.group.call("finish_checkpoint", deadline=deadline)
    ended = time.perf_counter()
    stall = ended - started - steps * step_s
    return {
        "nbytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        "copy_s": round(copied - started, 3),
        "steps": steps,
        "written_s": round(written - started, 3),
        "finish_s": round(ended - written, 3),
        "stall_s": round(stall, 3),
        "stall_steps": round(stall / step_s, 3),
    }


def print_stalls(case: str, stalls: list[Row]) -> None:
    """Prints a line per checkpoint."""
    for one in stalls:
        print(
            f"{case}: checkpoint of {one['nbytes'] / 1e9:.1f} GB: copied in {one['copy_s']:.2f} s, written after "
            f"{one['steps']:.0f} steps ({one['written_s']:.1f} s), completed in {one['finish_s']:.2f} s; stall "
            f"{one['stall_s']:.2f} s, {one['stall_steps']:.1f} steps"
        )
