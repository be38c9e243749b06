"""The campaign in short: a worker is killed and the run goes on; the next death ends it, as no restart is left."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from dagrl.telemetry.record import read_metrics
from tests.chaos.faults import FAULTS
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.trial import HANG_S, Row, Trial, differences

DAY_S = 86400
pytest.importorskip("megatron.core")


def disturbed(output: Path, faults: tuple[str, str], *overrides: str) -> tuple[Row, Row]:
    """Returns what came of two faults in one SFT run."""
    usual = SCENARIOS["sft"]
    trial = Trial(replace(usual, overrides=(*usual.overrides, *overrides)), output, "run", Random(0), None)  # noqa: S311
    trial.in_start = False
    trial.launch()
    try:
        first, second = (trial.disturb(FAULTS[fault], resume=False) for fault in faults)
    finally:
        trial.end()
    assert first is not None and second is not None
    return first, second


@pytest.mark.slow
def test_a_killed_worker_restarts_the_run_and_the_last_one_is_named(tmp_path: Path) -> None:
    kill = "SIGKILL train worker"
    first, last = disturbed(tmp_path, (kill, kill), "sft.max_num_steps=1000", "max_restarts=1")
    assert (first.outcome, first.wrong) == ("restarted", [])
    assert (last.outcome, last.exit_code, last.wrong) == ("stopped", 1, [])
    assert f"{last.did}) died in" in last.message


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_worker_that_dies_under_a_hung_raylet_gets_another_ray(tmp_path: Path) -> None:
    """Ray counts the node as dead after a while, and would never start a worker there again."""
    raylet, worker = disturbed(tmp_path, ("SIGSTOP raylet", "SIGSTOP train worker"), "sft.max_num_steps=100000")
    assert (raylet.outcome, raylet.wrong) == ("went on", [])
    assert (worker.outcome, worker.wrong) == ("restarted", [])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_of_a_day_by_the_wall_clock_is_that_of_half_a_minute(tmp_path: Path) -> None:
    """Checkpoints, locks, Ray and its links see days pass. Deadlines do not: their clock is monotonic, and stays."""
    usual, steps = SCENARIOS["grpo"], 600
    scenario = replace(usual, overrides=(*usual.overrides, f"grpo.max_num_steps={steps}"), steps=steps)
    truth, days = (Trial(scenario, tmp_path, name, Random(0), None) for name in ("truth", "days"))  # noqa: S311
    truth.launch()
    assert truth.finish() == []
    assert days.clock is not None
    with days.clock.fast(round(1.5 * DAY_S / seconds(truth))):
        days.launch()
        days.run.finish(3 * HANG_S)
    assert days.finish() == []
    assert differences(scenario, truth.directory, days.directory) == []
    assert seconds(days) > DAY_S


def seconds(trial: Trial) -> float:
    """Returns how long the run's steps took by the wall clock."""
    times = [float(line["time"]) for line in read_metrics(trial.directory / "metrics.jsonl") if "loss" in line]
    return times[-1] - times[0]
