"""Stops and kills: nothing is left behind, the last finished step is saved, and the run can resume from it."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dagrl.config.file import dump_config
from dagrl.run.checkpoint_store import CheckpointStore
from tests.integration.main_job import GRPO, LEARNING, OF_REPLAYS, SFT, SFT_STEPS, Run, copy_run, running, train, untimed
from tests.integration.test_async_grpo import configuration
from tests.integration.test_examples import OWN

pytest.importorskip("megatron.core")
pytest.importorskip("vllm")

WITHIN_S = 60.0  # for what takes 3 s on two free cores, a save among it; half of what anything that hangs would take
INTERRUPTED = 130
RESUMED = 8  # GRPO steps of the run that is stopped and goes on
TO_RESUME = (*LEARNING, "checkpointing.resume=true", f"grpo.max_num_steps={RESUMED}")
SMALL_SFT = ("sft.max_num_steps=1000", "sft.max_val_samples=64", "checkpointing.save_period=2")


def ends_in_time(run: Run, *signals: Callable[[], None]) -> int:
    """Sends the signals and waits until everything the command started has ended. Returns the exit code."""
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
    """Returns the step of the newest checkpoint, which must be complete."""
    latest = CheckpointStore(run.directory / "checkpoints").latest()
    assert latest is not None
    return latest.state.step


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stopped")


def test_a_stopped_run_saves_its_last_step(output: Path) -> None:
    """Both roles, the reward's process and Ray end, and what they had in shared memory is gone.

    The run has a loss and an advantage of a user's.
    """
    sections = {"executor": "compiled", "grpo": {"max_num_steps": 10_000, "val_period": 0}, **OWN}
    path = output / "unigram.yaml"
    path.write_text(dump_config(configuration(output, "unigram", **sections)))
    with running(str(path), output, "unigram") as run:
        run.wait_for_step(3)
        assert ends_in_time(run, lambda: os.killpg(run.process.pid, signal.SIGTERM)) == INTERRUPTED
        assert 3 <= saved_step(run) == run.metrics[-1]["step"]
        assert run.metrics[-1]["own/bounded_ratio"] == pytest.approx(1.0, abs=0.2)


@pytest.fixture(scope="module")
def stopped(learned: Run, output: Path) -> Run:
    """The learned run from the end of SFT, ended by SIGTERM in GRPO."""
    copy_run(learned.directory, output / "stopped", SFT_STEPS)
    with running(GRPO, output, "stopped", *TO_RESUME) as run:
        run.wait_for_step(SFT_STEPS + 1)
        assert ends_in_time(run, lambda: os.killpg(run.process.pid, signal.SIGTERM)) == INTERRUPTED
    return run


@pytest.mark.slow
def test_a_run_stopped_in_grpo_resumes_like_an_unstopped_run(stopped: Run, learned: Run, output: Path) -> None:
    assert SFT_STEPS < saved_step(stopped) == stopped.metrics[-1]["step"] < SFT_STEPS + RESUMED
    run = train(GRPO, output, "stopped", *TO_RESUME)
    whole = untimed([line for line in learned.metrics if line["step"] <= SFT_STEPS + RESUMED])
    resumed = untimed(run.metrics)
    assert [line["step"] for line in resumed] == [line["step"] for line in whole]
    for ours, theirs in zip(resumed, whole, strict=True):
        assert {**ours, **OF_REPLAYS} == {**theirs, **OF_REPLAYS}


@pytest.mark.parametrize(
    "config, moment",
    [
        pytest.param(SFT, "Starting Ray", marks=pytest.mark.slow),
        pytest.param(GRPO, "Starting 2 train", marks=pytest.mark.slow),
        pytest.param(GRPO, "train workers started", marks=pytest.mark.slow),  # and are warmed up
        pytest.param(SFT, "Compiling", marks=pytest.mark.slow),
    ],
)
def test_a_signal_during_the_start_ends_the_run(config: str, moment: str, output: Path) -> None:
    with running(config, output, f"start-{moment.replace(' ', '-')}") as run:
        run.wait_for_text(moment)
        assert ends_in_time(run, run.interrupt) == INTERRUPTED


@pytest.mark.slow
def test_a_run_whose_terminal_closes_saves_its_last_step(output: Path) -> None:
    with running(SFT, output, "hang-up", *SMALL_SFT) as run:
        run.wait_for_step(5)
        assert ends_in_time(run, run.hang_up) == INTERRUPTED
        assert saved_step(run) == run.metrics[-1]["step"]


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_a_save(output: Path) -> None:
    with running(SFT, output, "twice", *SMALL_SFT) as run:
        run.wait_for_step(5)
        assert ends_in_time(run, run.interrupt, run.interrupt) == INTERRUPTED
        assert 4 <= saved_step(run) <= run.metrics[-1]["step"]
