"""`dagrl.bench.gpu.faults` evaluates the files of its two runs; the runs themselves need GPUs."""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dagrl.bench.gpu.dying import PLACES, ask_for_death, has_died
from dagrl.bench.gpu.faults import DEATH_AT, _fault, run_together
from dagrl.errors import RunError


def test_workers_die_in_the_order_of_versions() -> None:
    assert sorted(PLACES, key=DEATH_AT.__getitem__) == list(PLACES)


def write_run(directory: Path, lines: dict[int, tuple[float, float]]) -> None:
    """Writes metrics; `lines` has the time and loss of each step."""
    directory.mkdir()
    text = [json.dumps({"step": step, "loss": loss, "grad_norm": 1.0, "time": when}) for step, (when, loss) in lines.items()]
    (directory / "metrics.jsonl").write_text("\n".join(text) + "\n")


def write_death(directory: Path, place: str, when: float) -> None:
    (directory / "deaths").mkdir(exist_ok=True)
    (directory / "deaths" / f"{place}.died").write_text(repr(when))


def test_fault_is_measured_from_the_death(tmp_path: Path) -> None:
    """The run reads the checkpoint of step 4 after the death at 190 s and that of step 6 after the death at 230 s."""
    times = {1: 181.0, 2: 182.0, 3: 183.0, 4: 184.0, 5: 205.0, 6: 206.0, 7: 255.0, 8: 256.0}
    write_run(tmp_path / "undisturbed", {step: (100.0 + step, float(step)) for step in times})
    losses = {step: step + (0.007 if step == 7 else 0.0) for step in times}
    write_run(tmp_path / "disturbed", {step: (when, losses[step]) for step, when in times.items()})
    write_death(tmp_path, "quantum", 190.0)
    write_death(tmp_path, "refit", 230.0)
    heard = [
        {"time": 180.0, "role": "train", "phase": "train_step"},
        {"time": 191.5, "role": "generation", "phase": "generate"},
        {"time": 230.5, "role": "generation", "phase": "refit"},
    ]
    (tmp_path / "heard.jsonl").write_text("".join(json.dumps(line) + "\n" for line in heard))
    quantum, refit = (_fault(place, ["quantum", "refit"], tmp_path) for place in ("quantum", "refit"))
    assert (quantum["role"], quantum["phase"]) == ("generation", "generate")
    assert (quantum["detected_s"], quantum["training_again_s"]) == (1.5, 15.0)
    assert (quantum["resumed_from_step"], quantum["steps_compared"], quantum["loss_difference"]) == (4, 2, 0.0)
    assert (refit["resumed_from_step"], refit["steps_compared"], refit["training_again_s"]) == (6, 2, 25.0)
    assert refit["loss_difference"] == pytest.approx(0.001)


def test_resume_from_an_older_checkpoint_is_detected(tmp_path: Path) -> None:
    """The resumed step comes from the run's metrics, not from the requested place of death."""
    write_run(tmp_path / "undisturbed", {step: (100.0 + step, 1.0) for step in range(1, 7)})
    write_run(tmp_path / "disturbed", {step: (200.0 + step, 1.0) for step in range(1, 7)})
    write_death(tmp_path, "quantum", 202.5)
    (tmp_path / "heard.jsonl").write_text(json.dumps({"time": 202.6, "role": "generation", "phase": "generate"}) + "\n")
    fault = _fault("quantum", ["quantum"], tmp_path)
    assert (fault["resumed_from_step"], fault["steps_compared"], fault["training_again_s"]) == (2, 4, 0.5)
    write_death(tmp_path, "quantum", 300.0)
    (tmp_path / "heard.jsonl").write_text(json.dumps({"time": 300.1, "role": "generation", "phase": "generate"}) + "\n")
    with pytest.raises(RunError, match="no step was trained between the death in quantum"):
        _fault("quantum", ["quantum"], tmp_path)
    write_death(tmp_path, "quantum", 400.0)
    with pytest.raises(RunError, match="no replay failed after the death in quantum"):
        _fault("quantum", ["quantum"], tmp_path)


def test_nan_loss_differs_from_any_loss(tmp_path: Path) -> None:
    write_run(tmp_path / "undisturbed", {step: (100.0 + step, 1.0) for step in range(1, 5)})
    write_run(tmp_path / "disturbed", {1: (201.0, 1.0), 2: (202.0, 1.0), 3: (203.0, 1.0), 4: (204.0, math.nan)})
    write_death(tmp_path, "quantum", 202.5)
    (tmp_path / "heard.jsonl").write_text(json.dumps({"time": 202.6, "role": "generation", "phase": "generate"}) + "\n")
    fault = _fault("quantum", ["quantum"], tmp_path)
    assert (fault["loss_difference"], fault["grad_norm_difference"]) == (math.inf, 0.0)


@pytest.mark.parametrize(
    ("deadline_s", "first", "message"),
    [
        (30.0, (sys.exit, (3,)), "run first ended with exit code 3"),
        (0.5, (time.sleep, (60,)), "not finished after 0 s: run first, second"),
    ],
)
def test_both_runs_stop_if_one_fails_or_is_late(deadline_s: float, first: tuple[Any, Any], message: str) -> None:
    context = multiprocessing.get_context("spawn")
    runs = [context.Process(target=first[0], args=first[1], name="first")]
    runs.append(context.Process(target=time.sleep, args=(60,), name="second"))
    with pytest.raises(RunError, match=message):
        run_together(runs, deadline_s)
    assert all(run.exitcode for run in runs)


def test_death_that_never_happened_raises(tmp_path: Path) -> None:
    ask_for_death(tmp_path / "deaths", "refit", DEATH_AT["refit"])
    assert not has_died(tmp_path / "deaths", "refit")
    with pytest.raises(RunError, match="no worker died in refit, at policy version 7"):
        _fault("refit", ["refit"], tmp_path)
