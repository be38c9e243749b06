"""Kills workers with SIGKILL during a run: time until the driver knows, time until it trains again, and effect on losses.

Two runs with the same seed: one undisturbed; the other loses a train worker in an all-reduce, a generation worker in a
quantum and one in a refit, and goes on each time (`on_failure: restart`). They run at the same time, on separate GPUs if
there are enough. Losses after each restart are compared with those of the undisturbed run. If a run fails or the deadline
passes, both are stopped.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagrl.config.plan import RunPlan
from dagrl.errors import RunError
from tests.faults.dying import DEATHS, PLACES, ask_for_death, died_at, has_died

if TYPE_CHECKING:
    from dagrl.config import Config

CONFIG = Path(__file__).with_name("killing.yaml")
DEATH_AT = {"all_reduce": 2, "quantum": 4, "refit": 7}
"""Policy version at each death; training step `v` makes version `v`."""

END_S = 20.0  # for a run to stop


def measure(
    path: Path, overrides: Sequence[str], places: Sequence[str] = PLACES, deadline_s: float = 540.0
) -> list[dict[str, Any]]:
    """Runs both and returns each fault. Raises RunError if a run fails or is late."""
    from dagrl.config.file import load_config

    with tempfile.TemporaryDirectory() as directory:
        config = load_config(path, [*overrides, f"output_dir={directory}"])
        workers = sum(layout.world_size for layout in RunPlan.of(config).layouts.values())
        for place in places:
            ask_for_death(Path(directory) / "deaths", place, DEATH_AT[place])
        undisturbed = config.model_copy(update={"name": "undisturbed"})
        disturbed = config.model_copy(update={"name": "disturbed", "on_failure": "restart"})
        _run_all([undisturbed, with_dying_workers(disturbed)], Path(directory), workers, deadline_s)
        return [_fault(place, places, Path(directory)) for place in places]


def with_dying_workers(config: Config) -> Config:
    """Returns the configuration with workers that die on request."""
    assert config.policy.generation is not None
    generation = config.policy.generation.model_copy(update={"worker": "tests.faults.dying:DyingVllmWorker"})
    policy = config.policy.model_copy(update={"worker": "tests.faults.dying:DyingMegatronWorker", "generation": generation})
    return config.model_copy(update={"policy": policy})


def _run_all(configs: Sequence[Config], directory: Path, workers: int, deadline_s: float) -> None:
    """Runs all configurations at the same time, on separate GPUs if there are enough."""
    from dagrl.machine import gpu_ids

    gpus = gpu_ids()
    apart = len(gpus) >= len(configs) * workers
    context = multiprocessing.get_context("spawn")
    runs = []
    for place, config in enumerate(configs):
        mine = gpus[place * workers : (place + 1) * workers] if apart else gpus
        runs.append(context.Process(target=_run, args=(config, directory, ",".join(mine)), name=config.name))
    run_together(runs, deadline_s)


def run_together(runs: Sequence[BaseProcess], deadline_s: float) -> None:
    """Starts processes and waits for all. If one fails or the deadline passes, stops all and raises RunError."""
    deadline = time.monotonic() + deadline_s
    for run in runs:
        run.start()
    try:
        while True:
            running = [run for run in runs if run.exitcode is None]
            if failed := [run for run in runs if run.exitcode]:
                raise RunError(f"run {failed[0].name} ended with exit code {failed[0].exitcode}; see its messages above")
            if not running:
                return
            if not wait([run.sentinel for run in running], max(0.0, deadline - time.monotonic())):
                names = ", ".join(run.name for run in running)
                raise RunError(f"not finished after {deadline_s:.0f} s: run {names}; raise --deadline")
    finally:
        _end(runs)


def _end(runs: Sequence[BaseProcess]) -> None:
    """Stops runs, which then end their clusters; kills those that do not stop."""
    for run in runs:
        run.terminate()
    deadline = time.monotonic() + END_S
    for run in runs:
        run.join(max(0.0, deadline - time.monotonic()))
        run.kill()
        run.join()


def _run(config: Config, directory: Path, gpus: str) -> None:
    """Runs one configuration in its own process and records when the driver learns of a failure."""
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    os.environ[DEATHS] = str(directory / "deaths")
    from dagrl.errors import PhaseError
    from dagrl.run.train import run_with_restarts, train
    from dagrl.runtime.replay import Replay

    tell = Replay.fail

    def note(self: Replay, error: Exception) -> None:
        failures = error.failures if isinstance(error, PhaseError) else ()
        heard = {"time": time.time(), "role": failures[0].role if failures else "", "phase": self.phase, "error": str(error)}
        with (directory / "heard.jsonl").open("a") as file:
            file.write(json.dumps(heard) + "\n")
        tell(self, error)

    Replay.fail = note  # type: ignore[method-assign]
    run_with_restarts(train, config)


def _fault(place: str, places: Sequence[str], directory: Path) -> dict[str, Any]:
    """Returns one death: seconds from the death to the driver's error, and to the end of the first training step after it.

    `resumed_from_step` is the step before that one. `loss_difference` and `grad_norm_difference` are the largest relative
    differences between steps from the restart to the next death and the same steps of the undisturbed run. `phase` is the
    phase named by the driver's error.
    """
    if not has_died(directory / "deaths", place):
        raise RunError(
            f"no worker died in {place}, at policy version {DEATH_AT[place]}: the run did not reach it. Use more steps, "
            "and algorithm grpo for places other than all_reduce"
        )
    died = died_at(directory / "deaths", place)
    told = directory / "heard.jsonl"
    heard = next((line for line in (_lines(told) if told.exists() else ()) if line["time"] > died), None)
    if heard is None:
        raise RunError(f"no replay failed after the death in {place}; see the driver's messages above")
    ours, theirs = (_steps(directory / name) for name in ("disturbed", "undisturbed"))
    later = places[places.index(place) + 1 :]
    until = died_at(directory / "deaths", later[0]) if later else math.inf
    compared = [step for step, line in ours.items() if died < line["time"] < until]
    if not compared:
        raise RunError(f"no step was trained between the death in {place} and the next; move them further apart")
    first = min(compared)
    differences = {
        f"{name}_difference": max(_difference(ours[step][name], theirs[step][name]) for step in compared)
        for name in ("loss", "grad_norm")
    }
    return {
        "place": place,
        "role": heard["role"],
        "phase": heard["phase"],
        "detected_s": round(heard["time"] - died, 3),
        "training_again_s": round(ours[first]["time"] - died, 1),
        "resumed_from_step": first - 1,
        "steps_compared": len(compared),
        **differences,
    }


def _difference(found: float, expected: float) -> float:
    """Returns the relative difference; infinite if either is not finite, because `max` could skip a NaN."""
    if not (math.isfinite(found) and math.isfinite(expected)):
        return math.inf
    return abs(found - expected) / max(abs(expected), 1e-9)


def _steps(directory: Path) -> dict[int, Any]:
    return {int(line["step"]): line for line in _lines(directory / "metrics.jsonl") if "loss" in line}


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]
