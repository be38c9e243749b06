"""Shows a run on the terminal: setup stages, one line of progress, and a summary of where the time went.

    with Progress(config.logger) as progress:
        progress.stage("Starting train workers")           # ends the previous stage and shows its time
        progress.stage("Warming up", row="warm-up")        # its row in the summary's table; others are start-up
        for step in range(1, total + 1):
            ...
            progress.step(step, total, {"reward/mean": 0.4, "loss": 0.01, "timing_s/generate": 0.8}, stage="grpo")
        progress.summary(clock.totals, paths.written())

If the output is not a terminal, it writes plain log lines instead, one per stage and one per step. While open, it handles
dagrl's log records, so that they do not break the bar.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from dagrl.config import LoggerConfig
from dagrl.telemetry.metrics import ACCURACY, KL, REWARD_MEAN, SPANS, TIMING, TOKENS_PER_SEC, VALIDATION

logger = logging.getLogger(__name__)

LOGGERS = ("dagrl", "graphs", "workers")
SHOWN = {REWARD_MEAN: "reward", ACCURACY: "accuracy", "loss": "loss", KL: "kl"}
LIVE_STYLES = ("dim", "cyan", "", "dim")
LEAST_REST = 0.05  # of a step: less outside of its phases is not shown
SUMMARY_WIDTH = 100  # of the closing tables in a log file


@dataclass(frozen=True)
class Setup:
    """A stage without steps, such as starting the workers."""

    name: str
    started: float
    row: str


@dataclass(frozen=True)
class Training:
    """A stage with steps. `validation` keeps the last validation metrics, as most steps have none."""

    name: str
    started: float
    reported: float
    first: int
    step: int
    total: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    validation: Mapping[str, float] = field(default_factory=dict)

    def seconds_left(self, now: float) -> float | None:
        """Estimates the time left from the mean step so far, counting down within a step; None before the second report."""
        done = self.step - self.first
        if done <= 0:
            return None
        at_report = (self.total - self.step) * (self.reported - self.started) / done
        return max(at_report - (now - self.reported), 0.0)


class Progress:
    """Shows one run, inside `with`. Call all methods from the driver's thread."""

    def __init__(self, config: LoggerConfig, console: Console | None = None) -> None:
        self._console = console or Console()
        self._level = config.log_level
        self._live: Live | None = None
        self._handler: logging.Handler = logging.NullHandler()
        self._levels: dict[str, int] = {}
        self._current: Setup | Training | None = None
        self._status = ""
        self._rows: dict[str, float] = {}  # seconds of stages without steps
        self._opened = time.monotonic()

    def __enter__(self) -> Progress:
        self._attach_logging()
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=8, transient=True)
            self._live.start(refresh=True)  # else a record at the time of the first refresh goes on the live line
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._finish(failed=error is not None)
        self._stop_live()
        for name, level in self._levels.items():
            logging.getLogger(name).propagate = True
            logging.getLogger(name).removeHandler(self._handler)
            logging.getLogger(name).setLevel(level)

    def stage(self, name: str, row: str = "start-up") -> None:
        """Begins a stage without steps and finishes the previous one. Its time is added to `row` of the summary."""
        self._finish()
        self._current = Setup(name, time.monotonic(), row)
        if not self._live:
            logger.info("%s ...", name)

    def step(self, step: int, total: int, metrics: Mapping[str, float], stage: str = "train") -> None:
        """Reports that `step` of `total` is done. `step` 0 opens the bar. Names are those of `dagrl.telemetry.metrics`."""
        before, now = self._current, time.monotonic()
        if not isinstance(before, Training) or before.name != stage:
            self._finish()
            # Without a report of step 0 the first step's time is unknown and not part of the estimate.
            before = Training(stage, now, now, step, step, total)
        validation = {name: value for name, value in metrics.items() if name.startswith(VALIDATION)}
        self._current = Training(
            stage, before.started, now, before.first, step, total, dict(metrics), {**before.validation, **validation}
        )
        self._status = ""
        if not self._live and step:
            shown = (_headline(self._current), _phases(metrics), _end(self._current.seconds_left(now)))
            logger.info("%s step %d/%d  %s", stage, step, total, "  ".join(filter(None, shown)))

    def status(self, text: str) -> None:
        """Shows work between two steps, such as a validation or a save, if the output is a terminal."""
        self._status = text

    def summary(self, phase_seconds: Mapping[str, float], paths: Mapping[str, Path]) -> None:
        """Shows where the time went and what was written. Call once, at the end."""
        self._finish()
        self._stop_live()
        seconds = {**phase_seconds, **self._rows}
        tables = (_time_table(seconds, time.monotonic() - self._opened), _path_table(paths))
        if self._console.is_terminal:
            self._console.print(*tables, sep="\n")
            return
        text = io.StringIO()
        Console(file=text, width=SUMMARY_WIDTH).print(*tables, sep="\n")
        for line in text.getvalue().rstrip().splitlines():
            logger.info("%s", line.rstrip())

    def _finish(self, failed: bool = False) -> None:
        """Replaces the current stage by a permanent line."""
        current, self._current, self._status = self._current, None, ""
        if current is None:
            return
        spent = time.monotonic() - current.started
        if isinstance(current, Setup):
            self._rows[current.row] = self._rows.get(current.row, 0.0) + spent
        line = f"{_title(current)}  {_seconds(spent)}"
        if isinstance(current, Training):
            line += f"  {current.step}/{current.total} steps  {_headline(current)}"
        mark = "[red]✗[/red]" if failed else "[green]✓[/green]"
        if self._live:
            self._console.print(f"{mark} {line}", highlight=False)
        else:
            logger.info("%s: %s", "stopped" if failed else "done", line)

    def _render(self) -> RenderableType:
        """Renders the live line in the refresh thread. The state that it shows is replaced, never modified."""
        current = self._current
        now = time.monotonic()
        if current is None:
            return Text("")
        if isinstance(current, Setup):
            return Spinner("dots", Text(f"{current.name}  {_seconds(now - current.started)}"), style="cyan")
        count = f"{current.step}/{current.total}"
        details = Column(no_wrap=True, overflow="ellipsis")
        bar = Table.grid(Column(), Column(), Column(min_width=len(count)), details, padding=(0, 1))
        parts = (_end(current.seconds_left(now)), self._status, _headline(current), _phases(current.metrics))
        bar.add_row(
            Text(_title(current), style="bold"),
            ProgressBar(current.total, current.step, width=20),
            count,
            Text("  ").join(Text(part, style) for part, style in zip(parts, LIVE_STYLES, strict=True) if part),
        )
        return bar

    def _stop_live(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def _attach_logging(self) -> None:
        if self._console.is_terminal:
            self._handler = RichHandler(console=self._console, show_path=False, log_time_format="%H:%M:%S")
        else:
            self._handler = logging.StreamHandler(self._console.file)
            self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        for name in LOGGERS:
            self._levels[name] = logging.getLogger(name).level
            logging.getLogger(name).setLevel(self._level)
            logging.getLogger(name).addHandler(self._handler)
            logging.getLogger(name).propagate = False  # else a handler of the root logger repeats everything


def _title(stage: Setup | Training) -> str:
    return stage.name.upper() if isinstance(stage, Training) else stage.name


def _headline(training: Training) -> str:
    """Formats reward, loss, KL, speed and the last validation as one line."""
    metrics = training.metrics
    parts = [f"{label} {metrics[name]:.4g}" for name, label in SHOWN.items() if name in metrics]
    if TOKENS_PER_SEC in metrics:
        parts.append(f"{metrics[TOKENS_PER_SEC]:,.0f} tokens/s")
    held_out = [(name.removeprefix(VALIDATION), value) for name, value in training.validation.items()]
    parts += [f"held-out {name} {value:.4g}" for name, value in held_out if name in SHOWN.values()]
    return "  ".join(parts)


def _phases(metrics: Mapping[str, float]) -> str:
    """Formats the time per phase of a step, the costliest first, and the rest of the step if no phases overlap."""
    phases = [item for item in metrics.items() if item[0].startswith(TIMING) and item[0] not in SPANS]
    rest, total = (
        metrics.get(TIMING + "total", 0.0) - sum(seconds for _, seconds in phases),
        metrics.get(TIMING + "total", 0.0),
    )
    phases += [("other", rest)] if rest > LEAST_REST * total else []
    ordered = sorted(phases, key=lambda item: -item[1])
    return "  ".join(f"{name.removeprefix(TIMING)} {value:.2f} s" for name, value in ordered)


def _end(left: float | None) -> str:
    """Formats the time left, and the time of day at which it is over; with the weekday if that is not today."""
    if not left:
        return ""
    now = datetime.now()
    end = now + timedelta(seconds=left)
    day = "" if end.date() == now.date() else f"{end:%a} "
    return f"{_seconds(left)} left, until {day}{end:%H:%M}"


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _time_table(phase_seconds: Mapping[str, float], wall: float) -> Table:
    """Returns a table of phases by cost, the time outside of phases, and the total."""
    numbers = [Column(heading, justify="right") for heading in ("seconds", "share")]
    table = Table("phase", *numbers, "", title="Where the time went", title_justify="left", title_style="bold")
    rows = sorted(phase_seconds.items(), key=lambda item: -item[1])
    if (other := wall - sum(phase_seconds.values())) > 0:
        rows.append(("other", other))
    for name, seconds in rows:
        share = seconds / wall if wall > 0 else 0.0
        table.add_row(name, f"{seconds:.1f}", f"{share:.0%}", ProgressBar(1.0, min(share, 1.0), width=24))
    table.add_section()
    table.add_row("whole run", f"{wall:.1f}", "", "")
    return table


def _path_table(paths: Mapping[str, Path]) -> Table:
    table = Table(title="Written", title_justify="left", title_style="bold", show_header=False, box=None)
    for name, path in paths.items():
        table.add_row(name, Text(str(path), overflow="fold"))
    return table
