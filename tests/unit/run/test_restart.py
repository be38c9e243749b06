"""Restarts: up to the limit, from the newest checkpoint, and only after lost workers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from dagrl.config import Config
from dagrl.errors import ClusterError, DagrlError, DataError, DeadlineError, PhaseError, RunError, WorkerError, WorkerFailure
from dagrl.run.fleet import Fleet
from dagrl.run.preflight import Inputs
from dagrl.run.start import open_session
from dagrl.run.stop import StopSignal, no_restart_after_stop
from dagrl.run.train import run_with_restarts


def configuration(**keys: Any) -> Config:
    base: dict[str, Any] = {"name": "run", "algorithm": "sft", "policy": {}, "data": {}}
    return Config.model_validate({**base, **keys})


class Run:
    """Fails a number of times, and records whether each call resumed."""

    def __init__(self, failures: int, error: DagrlError | None = None, progresses: bool = True) -> None:
        self.failures, self.error, self.progresses = failures, error or PhaseError((), "a worker died"), progresses
        self.resumed: list[bool] = []

    def __call__(self, config: Config, *, fleet: Fleet) -> None:
        self.resumed.append(config.checkpointing.resume)
        fleet.progressed = self.progresses
        if len(self.resumed) <= self.failures:
            raise self.error


def test_a_failure_during_a_stop_does_not_restart() -> None:
    stop, runs = StopSignal(), []

    def run(config: Config, *, fleet: Fleet) -> None:
        runs.append(config.checkpointing.resume)
        fleet.progressed = True
        with no_restart_after_stop(stop):
            stop.requested = len(runs) == 2
            raise PhaseError((), "train worker 0 hung")

    with pytest.raises(RunError, match="while it was stopping on request: train worker 0 hung"):
        run_with_restarts(run, configuration())
    assert runs == [False, True]


LOST = [PhaseError((), "a worker died"), WorkerError((), "a worker died as it saved"), DeadlineError("a save hung")]


@pytest.mark.parametrize("error", LOST)
def test_a_run_restarts_from_the_newest_checkpoint(error: DagrlError) -> None:
    run = Run(failures=2, error=error)
    run_with_restarts(run, configuration())
    assert run.resumed == [False, True, True]


def test_a_restart_does_not_read_data_and_model_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have changed since the run began, or the Hub may be down."""
    read, resumed = [], []

    def preflight(config: Config, early: Fleet) -> Inputs:
        read.append(config.name)
        return Inputs(config, {}, cast(Any, None), {})

    def prepare(config: Config, derived: object) -> None:
        resumed.append(config.checkpointing.resume)
        raise PhaseError((), "a worker died")

    def run(config: Config, *, fleet: Fleet) -> None:
        fleet.progressed = True
        with open_session(config, None, fleet):
            pass

    monkeypatch.setattr("dagrl.run.start.preflight", preflight)
    monkeypatch.setattr("dagrl.run.start.prepare_run_directory", prepare)
    with pytest.raises(PhaseError):
        run_with_restarts(run, configuration(max_restarts=2, output_dir=str(tmp_path)))
    assert read == ["run"] and resumed == [False, True, True]


DIED = WorkerFailure("train", 0, "", "here", 1, "train_step", 0, "", "died", "", "")


@pytest.mark.parametrize(
    ("error", "restarts"),
    [
        (PhaseError((DIED,)), True),
        (ClusterError("Ray ended"), True),
        (PhaseError((replace(DIED, kind="raised"),)), False),
        (DeadlineError("Ray has no GPU"), False),
    ],
)
def test_before_the_first_step_only_lost_processes_are_worth_a_restart(error: DagrlError, restarts: bool) -> None:
    run = Run(failures=1, error=error, progresses=False)
    with nullcontext() if restarts else pytest.raises(type(error)):
        run_with_restarts(run, configuration())
    assert run.resumed == ([False, True] if restarts else [False])


def test_the_last_failure_is_raised() -> None:
    run = Run(failures=9)
    with pytest.raises(PhaseError, match="a worker died"):
        run_with_restarts(run, configuration(max_restarts=2))
    assert run.resumed == [False, True, True]


@pytest.mark.parametrize("keys", [{"on_failure": "stop"}, {"checkpointing": {"enabled": False}}, {}])
def test_failures_without_a_restart_end_the_run(keys: dict[str, Any]) -> None:
    run = Run(failures=1, error=PhaseError((), "died") if keys else DataError("a line that is not JSON"))
    with pytest.raises(DagrlError):
        run_with_restarts(run, configuration(**keys))
    assert run.resumed == [False]
