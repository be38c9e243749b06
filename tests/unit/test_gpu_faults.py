"""What `bench.gpu.faults` makes of the files that its two runs leave; the runs themselves need GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu.dying import PLACES, ask_for_death, has_died
from bench.gpu.faults import DEATH_AT, _fault, places_of


def test_workers_die_in_the_order_of_versions() -> None:
    assert places_of("refit,quantum") == ["quantum", "refit"]
    assert sorted(PLACES, key=DEATH_AT.__getitem__) == list(PLACES)
    with pytest.raises(SystemExit, match="--places: found quanta; choose from all_reduce,quantum,refit"):
        places_of("refit,quanta")


def write_run(directory: Path, losses: dict[int, float], started: float) -> None:
    directory.mkdir()
    lines = [{"step": step, "loss": loss, "time": started + step} for step, loss in losses.items()]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_fault_is_told_from_the_death_on(tmp_path: Path) -> None:
    """A death in the fourth version is compared from the fifth step on, up to the seventh, where the next one was."""
    write_run(tmp_path / "undisturbed", {step: float(step) for step in range(1, 9)}, 100.0)
    write_run(tmp_path / "disturbed", {step: step + (0.007 if step == 7 else 0.0) for step in range(1, 9)}, 200.0)
    (tmp_path / "deaths").mkdir()
    (tmp_path / "deaths" / "quantum.died").write_text("190.0")
    heard = [
        {"time": 180.0, "role": "train", "phase": "train_step"},
        {"time": 191.5, "role": "generation", "phase": "generate"},
    ]
    (tmp_path / "heard.jsonl").write_text("".join(json.dumps(line) + "\n" for line in heard))
    fault = _fault("quantum", ["quantum", "refit"], tmp_path)
    assert (fault.role, fault.phase, fault.detected_s, fault.training_again_s) == ("generation", "generate", 1.5, 15.0)
    assert (fault.resumed_from_step, fault.steps_compared) == (4, 2)
    assert fault.loss_difference == 0.0
    assert _fault("quantum", ["quantum"], tmp_path).loss_difference == pytest.approx(0.001)


def test_a_death_that_never_happened_is_told(tmp_path: Path) -> None:
    ask_for_death(tmp_path / "deaths", "refit", DEATH_AT["refit"])
    assert not has_died(tmp_path / "deaths", "refit")
    with pytest.raises(SystemExit, match="no worker died in refit, at policy version 7"):
        _fault("refit", ["refit"], tmp_path)
