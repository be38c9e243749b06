"""What a driver that takes over finds: the record of the last step, the lease, and where the workers are."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from dagrl.cli.main import main
from dagrl.config.checks import check_settings
from dagrl.config.file import dump_config, load_config
from dagrl.errors import CheckpointError, ConfigError
from dagrl.run.checkpoint_store import TrainState
from dagrl.run.driver_record import DEMONSTRATIONS, DriverRecord, go_on
from dagrl.run.leased_cluster import FILE, LeaseFile, read_lease, refuse_orphans
from dagrl.run.worker_protocols import Handover
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.lease import Lease
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.metrics import StepMetrics
from dagrl.telemetry.record import RunPaths, lock_run

EXAMPLES = Path(__file__).parents[3] / "examples"
SFT = EXAMPLES / "sft_quickstart.yaml"
NUMBERS = {DEMONSTRATIONS: 7, "train_step": 9}


@pytest.fixture
def record(tmp_path: Path) -> DriverRecord:
    """The record of step 3."""
    found = DriverRecord(tmp_path / "driver")
    found.write(TrainState(2, {"sft_sampler": {"drawn": 32}}), [], {})
    found.write(TrainState(3, {"sft_sampler": {"drawn": 48}}), [lambda path: (path / "part").write_text("x")], NUMBERS)  # type: ignore[list-item]
    return found


def only(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "driver").iterdir()
    return found


def test_the_last_record_is_read(record: DriverRecord, tmp_path: Path) -> None:
    found, numbers = record.read()
    assert found.state == TrainState(3, {"sft_sampler": {"drawn": 48}}) and numbers == NUMBERS
    assert (found.directory / "part").read_text() == "x" and found.directory == only(tmp_path)


def test_a_driver_that_dies_while_it_writes_leaves_the_record_before(record: DriverRecord, tmp_path: Path) -> None:
    torn = tmp_path / "driver" / "step_00000004.tmp"
    torn.mkdir()
    (torn / "state.json").write_text('{"format": 1, "step": 4, "coun')
    assert record.read()[0].state.step == 3


@pytest.mark.parametrize("name", ["state.json", "manifest.json", "part"])
def test_a_record_that_was_cut_or_changed_is_not_used(name: str, record: DriverRecord, tmp_path: Path) -> None:
    path = only(tmp_path) / name
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole[:-1] + b"\xff"):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            record.read()


def test_a_record_of_another_version_is_not_used(record: DriverRecord, tmp_path: Path) -> None:
    path = only(tmp_path) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 0}))
    with pytest.raises(CheckpointError, match="has format 0; this version of dagrl reads format 1"):
        record.read()


@dataclass
class _Role:
    name: str = "train"
    methods: set[str] = field(default_factory=lambda: {"take_over"})


@dataclass
class Survivors:
    """A test double of a train group of two replicas."""

    handovers: list[Handover]
    role: _Role = field(default_factory=_Role)
    layout: ParallelLayout = field(default_factory=lambda: ParallelLayout(dp=2))

    def call(self, method: str, deadline: object) -> list[Handover]:
        assert method == "take_over"
        return self.handovers


def after(*updates: tuple[str, int] | None, metrics: StepMetrics | None = None) -> list[Any]:
    """The groups, whose workers began these updates last."""
    return [Survivors([Handover(update, metrics) for update in updates])]


METRICS = StepMetrics({"loss": 0.25})
BEFORE, BEGUN, NEXT = (DEMONSTRATIONS, 6), (DEMONSTRATIONS, 7), (DEMONSTRATIONS, 8)


@pytest.mark.parametrize("groups", [after(BEFORE, BEFORE), after(None, None), after(("train_step", 8), ("train_step", 8))])
def test_workers_without_a_later_update_go_on_from_the_recorded_step(groups: list[Any], record: DriverRecord) -> None:
    taken = go_on(load_config(SFT), groups, record)
    assert taken is not None and taken.record.state.step == 3 and taken.next_replays == NUMBERS and not taken.known


def test_an_update_that_was_not_recorded_is_not_applied_again(record: DriverRecord) -> None:
    taken = go_on(load_config(SFT), cast("list[WorkerGroup]", after(BEGUN, BEGUN, metrics=METRICS)), record)
    assert taken is not None and taken.record.state.step == 3
    assert taken.known == {DEMONSTRATIONS: [METRICS, METRICS]}
    assert taken.next_replays[DEMONSTRATIONS] == 8, "the next death must not take this update for a later one"


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        (after(BEGUN, BEFORE, metrics=METRICS), "of some workers only"),
        (after(BEGUN, BEGUN), "step 4 had begun to update"),
        (after(NEXT, NEXT, metrics=METRICS), "step 4 had begun to update"),
        (after(("train_step", 9), ("train_step", 9), metrics=METRICS), "step 4 had begun to update"),
        ([], "have died too"),
    ],
)
def test_other_states_are_loaded_from_the_newest_checkpoint(
    groups: list[Any], why: str, record: DriverRecord, caplog: pytest.LogCaptureFixture
) -> None:
    assert go_on(load_config(SFT), groups, record) is None
    assert why in caplog.text


def test_without_a_record_the_newest_checkpoint_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert go_on(load_config(SFT), after(BEFORE, BEFORE), DriverRecord(tmp_path / "driver")) is None
    assert "no step was recorded" in caplog.text


def test_one_driver_has_the_lease() -> None:
    lease = Lease(orphan_s=1e9)
    assert lease.take("first", "a", sure=False) == "first"
    assert lease.take("second", "b", sure=False) == "first" and lease.renew("a") and not lease.renew("b")
    assert lease.take("third", "c", sure=True) == "third"
    assert not lease.renew("a"), "a driver that was stopped learns that it has been replaced"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run that has ended."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.yaml").write_text(dump_config(load_config(SFT)))
    return directory


def attach(directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that is refused."""
    assert main(["attach", str(directory)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_has_no_workers_that_wait_cannot_be_attached_to(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no config.yaml; expected the directory of a run" in attach(tmp_path, capsys)
    assert "no workers wait for a driver: the run has ended" in attach(run, capsys)
    (run / FILE).write_text(json.dumps(vars(LeaseFile("host:1", os.uname().nodename, os.getpid(), 60.0))))
    assert "no workers wait for a driver: the run has ended" in attach(run, capsys), "its keeper is no such process"
    (run / FILE).write_text(json.dumps({"format": 0}))
    assert "has format 0; this version of dagrl reads format 1" in attach(run, capsys)
    (run / FILE).write_text('{"format": 1, "addr')
    assert "is damaged" in attach(run, capsys)


def test_a_run_whose_driver_lives_cannot_be_attached_to(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_run(RunPaths(run, run / "checkpoints")):
        assert f"is in use by pid {os.getpid()} on {os.uname().nodename}" in attach(run, capsys)


def test_a_new_run_does_not_start_beside_workers_that_wait(run: Path) -> None:
    refuse_orphans(run)
    (run / FILE).write_text(json.dumps(vars(LeaseFile("10.0.0.7:6379", "another", None, 60.0))))
    with pytest.raises(ConfigError, match=r"wait for another one at 10\.0\.0\.7:6379: take them over with `dagrl attach"):
        refuse_orphans(run)
    os.utime(run / FILE, (0, 0))  # the driver last renewed the lease long ago
    refuse_orphans(run)
    found = read_lease(run)
    assert found is not None and not found.may_wait(run)


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["timeouts.orphan_s=2"], r"timeouts\.orphan_s"),
        (["timeouts.orphan_s=60", "executor_cfg.engine=ray"], "set engine: dagrl, or orphan_s: 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        check_settings(load_config(SFT, overrides))
