"""Output of a run: plain lines in a file, a live bar on a terminal, and log records in both."""

import contextlib
import io
import logging
import os
import pty
import re
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

from dagrl.config import LoggerConfig
from dagrl.telemetry.progress import Progress, seconds_left

METRICS = {"reward/mean": 0.4125, "loss": 0.00312, "policy/kl": 0.0012, "perf/tokens_per_sec": 12345.6}
METRICS |= {"timing_s/refit": 0.05, "timing_s/generate": 0.8, "timing_s/total": 1.0}


class Screen:
    def __init__(self, terminal: bool) -> None:
        self._file = io.StringIO()
        self.console = Console(file=self._file, force_terminal=terminal, width=110, color_system=None)

    @property
    def text(self) -> str:
        return self._file.getvalue()

    @property
    def lines(self) -> list[str]:
        """Returns the lines without times of day and terminal control sequences."""
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)
        return [re.sub(r"^\d\d:\d\d:\d\d INFO ", "", line).rstrip() for line in plain.splitlines()]


MARKS = {"evaluation/gsm8k": 0.0637, "evaluation/gsm8k_low": 0.0518, "evaluation/gsm8k_high": 0.0781}


def short_run(screen: Screen, level: str = "INFO") -> None:
    with Progress(LoggerConfig.model_validate({"log_level": level}), screen.console) as progress:
        progress.stage("Starting train workers")
        progress.stage("Warming up", "warm-up")
        progress.step(5, 6, {}, stage="sft")
        progress.step(0, 2, {}, stage="grpo")
        progress.step(1, 2, {**METRICS, "validation/reward": 0.35, **MARKS}, stage="grpo")
        progress.status("saving")
        progress.step(2, 2, METRICS, stage="grpo")
        logging.getLogger("dagrl.run.checkpoint_store").info("a record of another module")
        progress.stage("Exporting", "export")
        progress.summary({"generate": 3.0, "train_step": 1.0}, {"metrics": Path("runs/tiny/metrics.jsonl")})


def test_plain_lines_without_a_terminal() -> None:
    screen = Screen(terminal=False)
    short_run(screen)
    timeless = [re.sub(r"\d\.\d s$", "0.0 s", line) for line in screen.lines[:2]]
    assert timeless == ["Starting train workers ...", "done: Starting train workers  0.0 s"]
    numbers = "reward 0.4125  loss 0.00312  kl 0.0012  12,346 tokens/s  held-out reward 0.35  gsm8k 0.0637"
    times = "generate 0.80 s  other 0.15 s  refit 0.05 s"
    step = re.escape(f"grpo step 1/2  {numbers}  {times}") + r"  \d\.\d s left, until (\w{3} )?\d\d:\d\d"
    assert any(re.fullmatch(step, line) for line in screen.lines)
    assert f"grpo step 2/2  {numbers}  {times}" in screen.lines
    assert "a record of another module" in screen.lines
    assert not any(line.startswith("sft step") for line in screen.lines), "a resumed run goes on there"
    assert any(line.startswith("done: GRPO") and "2/2 steps" in line for line in screen.lines)
    assert "\x1b" not in screen.text


@pytest.mark.parametrize("terminal", [False, True])
def test_the_summary_shows_times_and_paths(terminal: bool) -> None:
    screen = Screen(terminal)
    short_run(screen)
    text = "\n".join(screen.lines)
    assert text.index("Where the time went") < text.index("generate", text.index("Where")) < text.index("train_step")
    assert re.search(r"generate\W+3\.0", text)
    for row in ("start-up", "warm-up", "export"):
        assert re.search(rf"{row}\W+0\.\d", text)
    assert re.search(r"metrics +runs/tiny/metrics\.jsonl", text)


class Terminal:
    """A real terminal device, and an emulator that shows what is written to it."""

    def __init__(self) -> None:
        pyte = pytest.importorskip("pyte")
        self._reader, writer = pty.openpty()
        termios.tcsetwinsize(writer, (24, 150))
        os.set_blocking(self._reader, False)
        self._screen = pyte.Screen(150, 24)
        self._stream = pyte.ByteStream(self._screen)
        self.console = Console(file=os.fdopen(writer, "w"), width=150)

    def close(self) -> None:
        self.console.file.close()
        os.close(self._reader)

    @property
    def lines(self) -> list[str]:
        """Returns the lines on the screen, without times of day."""
        with contextlib.suppress(BlockingIOError):
            while written := os.read(self._reader, 1 << 16):
                self._stream.feed(written)
        shown = [re.sub(r"^(\d\d:\d\d:\d\d)? *INFO +", "", line).rstrip() for line in self._screen.display]
        return [line for line in shown if line]

    def wait_for(self, *patterns: str) -> None:
        """Waits until the lines of the screen match, one pattern each."""
        end = time.monotonic() + 30.0
        while len(lines := self.lines) != len(patterns) or not all(map(re.fullmatch, patterns, lines)):
            assert time.monotonic() < end, "\n".join(lines)
            time.sleep(0.02)


def test_a_terminal_has_one_line_that_is_redrawn_below_what_is_finished() -> None:
    terminal = Terminal()
    log = logging.getLogger("dagrl.run.checkpoint_store")
    with contextlib.closing(terminal):
        with Progress(LoggerConfig(), terminal.console) as progress:
            progress.stage("Starting train workers")
            log.info("a first record")
            bar = r"[━╸╺ ]+ \d:\d\d:\d\d"
            terminal.wait_for("a first record", rf"{bar} Starting train workers")
            log.info("another")
            progress.step(0, 400, {}, stage="sft")
            time.sleep(0.1)
            progress.step(1, 400, METRICS, stage="sft")
            numbers = r"reward 0\.4125  loss 0\.00312  kl 0\.0012  12,346 tokens/s"
            left, times = r"\d+\.\d s left, until (\w{3} )?\d\d:\d\d", r"generate 0\.80 s  other .*"
            above = ("a first record", "another", r"✓ Starting train workers  \d+\.\d s")
            terminal.wait_for(*above, rf"{bar} SFT 1/400  {left}  {numbers}  {times}")
            progress.status("validating")
            terminal.wait_for(*above, rf"{bar} SFT 1/400  {left}  validating  {numbers}.*")
            progress.step(1, 2, METRICS, stage="grpo")
        terminal.wait_for(*above, rf"✓ SFT  \d\.\d s  1/400 steps  {numbers}", rf"✓ GRPO  \d\.\d s  1/2 steps  {numbers}")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_failed_stage_is_marked(terminal: bool) -> None:
    screen = Screen(terminal)
    with pytest.raises(KeyboardInterrupt), Progress(LoggerConfig(), screen.console) as progress:
        progress.stage("Warming up")
        raise KeyboardInterrupt
    assert ("✗ Warming up" if terminal else "stopped: Warming up") in "\n".join(screen.lines)


def test_the_log_level_applies_and_is_restored() -> None:
    screen = Screen(terminal=False)
    before = logging.getLogger("dagrl").level, list(logging.getLogger("dagrl").handlers)
    short_run(screen, level="WARNING")
    assert screen.text == ""
    assert (logging.getLogger("dagrl").level, logging.getLogger("dagrl").handlers) == before


@pytest.mark.parametrize(("spent", "done", "left", "expected"), [(30, 10, 40, 120), (30, 50, 0, 0), (0, 0, 49, None)])
def test_the_time_left_is_the_mean_step_times_the_steps_left(spent: float, done: int, left: int, expected: float) -> None:
    assert seconds_left(spent, done, left) == expected
