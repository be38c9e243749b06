"""Runs that lose workers to SIGKILL, compared with an undisturbed one of the same seed.

The disturbed run loses a train worker in an all-reduce, a generation worker in a quantum and one in a refit, and goes on
each time (`on_failure: restart`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.dying import DEATHS, PLACES, ask_for_death, died_at
from tests.integration.main_job import Metrics, Run, running

CONFIG = str(Path(__file__).with_name("killing.yaml"))
DEATH_AT = {"all_reduce": 2, "quantum": 4, "refit": 7}
"""Policy version at each death; training step `v` makes version `v`."""

DYING = (
    "policy.worker=tests.faults.dying:DyingMegatronWorker",
    "policy.generation.worker=tests.faults.dying:DyingVllmWorker",
    "on_failure=restart",
)


@dataclass(frozen=True)
class Fault:
    """What came of a death. Differences are relative, the largest of the steps from the restart to the next death."""

    place: str
    resumed_from_step: int
    steps_compared: int
    loss_difference: float
    grad_norm_difference: float
    seconds: float
    """From the death to the end of the next step."""


def measure(directory: Path, overrides: Sequence[str], places: Sequence[str] = PLACES) -> list[Fault]:
    """Trains undisturbed and disturbed, and returns each fault."""
    deaths = directory / "deaths"
    for place in places:
        ask_for_death(deaths, place, DEATH_AT[place])
    runs = []
    for name, more in (("undisturbed", ()), ("disturbed", DYING)):
        with running(CONFIG, directory, name, *overrides, *more, **{DEATHS: str(deaths)}) as run:
            assert run.finish() == 0, run.shown
        runs.append(run)
    theirs, ours = map(_steps, runs)
    ends = [*(died_at(deaths, place) for place in places[1:]), math.inf]
    return [_fault(place, died_at(deaths, place), end, ours, theirs) for place, end in zip(places, ends, strict=True)]


def _fault(place: str, died: float, until: float, ours: dict[int, Metrics], theirs: dict[int, Metrics]) -> Fault:
    compared = [step for step, line in ours.items() if died < line["time"] < until]
    loss, norm = (
        max(abs(ours[step][name] - theirs[step][name]) / max(abs(theirs[step][name]), 1e-9) for step in compared)
        for name in ("loss", "grad_norm")
    )
    return Fault(place, min(compared) - 1, len(compared), loss, norm, ours[min(compared)]["time"] - died)


def _steps(run: Run) -> dict[int, Metrics]:
    return {line["step"]: line for line in run.metrics if "loss" in line}
