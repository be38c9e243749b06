"""Stopping, asked for and not: nothing is left behind, the last finished step is saved, and the run can go on from it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dagrl.checkpoint import CheckpointStore
from tests.integration.main_job import GRPO, SFT, SMALL, SMALL_SFT_STEPS, SMALL_STEPS, Run, running, train, untimed

pytest.importorskip("megatron.core")
pytest.importorskip("vllm")

WITHIN_S = 60.0  # for what takes 3 s on two free cores, a save among it; half of what anything that hangs would take
INTERRUPTED = 130
RESUME = "checkpointing.resume=true"
SMALL_SFT = ("sft.max_num_steps=1000", "sft.max_val_samples=64", "checkpointing.save_period=2")


def ends_in_time(run: Run, *signals: Callable[[], None]) -> int:
    """Send the signals; the exit code, when all that the command started is gone: in seconds, on a machine that is free."""
    started = time.monotonic()
    for send in signals:
        send()
        time.sleep(0.1)
    code = run.finish(WITHIN_S)
    while (run.left_processes() or run.left_shared_memory()) and time.monotonic() - started < WITHIN_S:
        time.sleep(0.1)
    assert not run.left_processes()
    assert not run.left_shared_memory()
    assert "Traceback" not in run.shown
    return code


def saved_step(run: Run) -> int:
    """The step of the newest checkpoint, which must be whole."""
    latest = CheckpointStore(run.directory / "checkpoints").latest()
    assert latest is not None
    return latest.state.step


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stopped")


def test_a_run_stopped_in_grpo_goes_on_as_one_that_was_not(small_run: Run, output: Path) -> None:
    with running(GRPO, output, "stopped", *SMALL) as run:
        run.wait_for_step(SMALL_SFT_STEPS + 1)
        assert ends_in_time(run, lambda: os.kill(run.process.pid, signal.SIGTERM)) == INTERRUPTED
        assert SMALL_SFT_STEPS < saved_step(run) == run.metrics[-1]["step"] < SMALL_STEPS
    run = train(GRPO, output, "stopped", *SMALL, RESUME)
    whole, resumed = untimed(small_run.metrics), untimed(run.metrics)
    assert [line["step"] for line in resumed] == [line["step"] for line in whole]
    for ours, theirs in zip(resumed, whole, strict=True):
        assert {**ours, "replays": 0} == {**theirs, "replays": 0}  # a resumed run refits once more


@pytest.mark.parametrize(
    "config, moment",
    [
        (SFT, "Starting Ray"),
        pytest.param(GRPO, "Starting 2 train", marks=pytest.mark.slow),
        pytest.param(SFT, "Compiling", marks=pytest.mark.slow),
    ],
)
def test_a_start_is_broken_off(config: str, moment: str, output: Path) -> None:
    with running(config, output, f"start-{moment.replace(' ', '-')}") as run:
        run.wait_for_text(moment)
        assert ends_in_time(run, run.interrupt) == INTERRUPTED


@pytest.mark.slow
def test_a_second_time_does_not_wait_for_a_save(output: Path) -> None:
    with running(SFT, output, "twice", *SMALL_SFT) as run:
        run.wait_for_step(5)
        assert ends_in_time(run, run.interrupt, run.interrupt) == INTERRUPTED
        assert 4 <= saved_step(run) <= run.metrics[-1]["step"]


def test_a_killed_worker_is_named_and_ends_the_run(output: Path) -> None:
    with running(GRPO, output, "killed", *SMALL, "sft.max_num_steps=1000") as run:
        run.wait_for_step(7)  # the save after step 6 waited for the one after step 3
        worker = next(process for process in run.seen if process.name.startswith("ray::Megatron"))
        assert ends_in_time(run, lambda: os.kill(worker.pid, signal.SIGKILL)) == 1
        assert f"pid {worker.pid}) died in" in run.shown.replace("\n", "")
        assert run.shown.count("dagrl: error:") == 1
        assert 3 <= saved_step(run) <= run.metrics[-1]["step"]
