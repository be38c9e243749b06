"""Whether a disturbed run ended like an undisturbed one: bit for bit where that is promised, else within bounds."""

import math
from pathlib import Path

from dagrl.telemetry.record import read_metrics
from tests.chaos.scenarios import Scenario
from tests.integration.main_job import OF_REPLAYS, Metrics, untimed

WEIGHTS = "final_model/model.safetensors"


def differences(scenario: Scenario, truth: Path | None, found: Path) -> list[str]:
    """Returns what differs between the directories of an undisturbed run and of a disturbed one that reached its end.

    `truth` is None for a scenario that is not `exact`.
    """
    ours = _metrics(found)
    steps, expected = [int(line["step"]) for line in ours], list(range(1, scenario.steps + 1))
    if steps != expected:
        missing, more = sorted(set(expected) - set(steps)), [step for step in set(steps) if steps.count(step) > 1]
        return [f"steps {missing} are missing, {more} are there more than once"]
    if truth is not None:
        return _exact(ours, _metrics(truth), truth, found)
    losses = [line["loss"] for line in ours if "loss" in line]
    return [] if all(loss is not None and math.isfinite(loss) for loss in losses) else ["a loss is not finite"]


def _exact(ours: list[Metrics], theirs: list[Metrics], truth: Path, found: Path) -> list[str]:
    wrong = []
    for one, other in zip(ours, theirs, strict=True):
        keys = [key for key in {**one, **other} if key not in OF_REPLAYS and one.get(key) != other.get(key)]
        if keys:
            shown = {key: (one.get(key), other.get(key)) for key in keys[:4]}
            wrong.append(f"step {one['step']}, first metrics that differ (disturbed, undisturbed): {shown}")
            break
    if (found / WEIGHTS).read_bytes() != (truth / WEIGHTS).read_bytes():
        wrong.append("the final weights differ")
    return wrong


def _metrics(directory: Path) -> list[Metrics]:
    return untimed([line for line in read_metrics(directory / "metrics.jsonl") if "loss" in line])
