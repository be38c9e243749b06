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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress as Bars, ProgressColumn, Task, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from dagrl.config import LoggerConfig
from dagrl.machine import process_seconds
from dagrl.telemetry.metrics import ACCURACY, EVALUATION, KL, REWARD_MEAN, SPANS, TIMING, TOKENS_PER_SEC, VALIDATION

logger = logging.getLogger(__name__)

LOGGER = logging.getLogger("dagrl")
SHOWN = {REWARD_MEAN: "reward", ACCURACY: "accuracy", "loss": "loss", KL: "kl"}
LEAST_REST = 0.05  # of a step: less outside of its phases is not shown
SUMMARY_WIDTH = 100  # of the closing tables in a log file


@dataclass
class Stage:
    """What the run does now. Without `total` steps it is set-up, and its time goes to `row` of the summary.

    `words` are those of the last step: the time left, results, and phases.
    """

    name: str
    total: int | None = None
    row: str = ""
    first: int = 0
    step: int = 0
    validation: dict[str, float] = field(default_factory=dict)
    words: Sequence[str] = ("", "", "")
    started: float = field(default_factory=time.monotonic)


class _Line(ProgressColumn):
    """The task's description, cut to the width that is left."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class Progress:
    """Shows one run, inside `with`. Call all methods from the driver's thread."""

    def __init__(self, config: LoggerConfig, console: Console | None = None) -> None:
        self._console = console or Console()
        self._terminal, self._level = self._console.is_terminal, config.log_level
        columns = BarColumn(10), TimeElapsedColumn(), _Line()
        self._bars = Bars(*columns, console=self._console, transient=True, disable=not self._terminal)
        self._bar = self._bars.add_task("", total=None, visible=False)
        self._handler: logging.Handler = logging.NullHandler()
        self._level_before = LOGGER.level
        self._current: Stage | None = None
        self._launch = 0.0  # seconds from the start of this process to the end of the first step
        self._rows: dict[str, float] = {}  # seconds of stages without steps
        self._opened = time.monotonic()

    def __enter__(self) -> Progress:
        self._attach_logging()
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._finish(failed=error is not None)
        self._bars.stop()
        LOGGER.propagate = True
        LOGGER.removeHandler(self._handler)
        LOGGER.setLevel(self._level_before)

    def stage(self, name: str, row: str = "start-up") -> None:
        """Begins a stage without steps and finishes the previous one. Its time is added to `row` of the summary."""
        self._begin(Stage(name, row=row))
        if not self._terminal:
            logger.info("%s ...", name)

    def step(self, step: int, total: int, metrics: Mapping[str, float], stage: str = "train") -> None:
        """Reports that `step` of `total` is done. `step` 0 opens the bar. Names are those of `dagrl.telemetry.metrics`."""
        current = self._current
        if current is None or current.total is None or current.name != stage:
            # Without a report of step 0 the first step's time is unknown and not part of the estimate.
            current = self._begin(Stage(stage, total, first=step))
        if step and metrics and self._launch == 0.0:
            self._launch = process_seconds()
        current.step = step
        current.validation |= {name: value for name, value in metrics.items() if name.startswith((VALIDATION, EVALUATION))}
        left = seconds_left(time.monotonic() - current.started, step - current.first, total - step)
        current.words = _end(left), _headline(metrics, current.validation), _phases(metrics)
        self._bars.update(self._bar, completed=step)
        self.status("")
        if not self._terminal and step and metrics:  # there are none where a resumed run goes on
            logger.info("%s step %d/%d  %s", stage, step, total, _joined(*current.words[1:], current.words[0]))

    def status(self, text: str) -> None:
        """Shows work between two steps, such as a validation or a save, if the output is a terminal."""
        if current := self._current:
            steps = f"{current.step}/{current.total}" if current.total else ""
            left, *results = current.words
            self._bars.update(self._bar, description=_joined(f"{_title(current)} {steps}", left, text, *results))

    def summary(self, phase_seconds: Mapping[str, float], paths: Mapping[str, Path]) -> None:
        """Shows where the time went and what was written. Call once, at the end."""
        self._finish()
        self._bars.stop()
        seconds = {**phase_seconds, **self._rows}
        tables = (_time_table(seconds, time.monotonic() - self._opened, self._launch), _path_table(paths))
        if self._terminal:
            self._console.print(*tables, sep="\n")
            return
        text = io.StringIO()
        Console(file=text, width=SUMMARY_WIDTH).print(*tables, sep="\n")
        for line in text.getvalue().rstrip().splitlines():
            logger.info("%s", line.rstrip())

    def _begin(self, stage: Stage) -> Stage:
        self._finish()
        self._current = stage
        self._bars.remove_task(self._bar)  # `reset` to no total would keep the last one
        self._bar = self._bars.add_task(_title(stage), total=stage.total)
        return stage

    def _finish(self, failed: bool = False) -> None:
        """Replaces the current stage by a permanent line."""
        current, self._current = self._current, None
        if current is None:
            return
        self._bars.update(self._bar, visible=False)
        spent = time.monotonic() - current.started
        if current.total is None:
            self._rows[current.row] = self._rows.get(current.row, 0.0) + spent
        steps = f"{current.step}/{current.total} steps" if current.total else ""
        line = _joined(_title(current), _seconds(spent), steps, current.words[1])
        mark = "[red]✗[/red]" if failed else "[green]✓[/green]"
        if self._terminal:
            self._console.print(f"{mark} {line}", highlight=False)
        else:
            logger.info("%s: %s", "stopped" if failed else "done", line)

    def _attach_logging(self) -> None:
        self._handler = log_handler(self._console)
        LOGGER.setLevel(self._level)
        LOGGER.addHandler(self._handler)
        LOGGER.propagate = False  # else a handler of the root logger repeats everything


def log_handler(console: Console) -> logging.Handler:
    """Returns what shows log records: in columns on a terminal, else a line each, however long."""
    if console.is_terminal:
        return RichHandler(console=console, show_path=False, log_time_format="%H:%M:%S")
    handler = logging.StreamHandler(console.file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    return handler


def seconds_left(spent: float, done: int, left: int) -> float | None:
    """Estimates the time that `left` steps take from the mean of those `done`; None before the first."""
    return left * spent / done if done > 0 else None


def _joined(*words: str) -> str:
    return "  ".join(filter(None, words))


def _title(stage: Stage) -> str:
    return stage.name if stage.total is None else stage.name.upper()


def _headline(metrics: Mapping[str, float], validation: Mapping[str, float]) -> str:
    """Formats reward, loss, KL, speed, the last validation and the last marks on standard sets as one line."""
    parts = [f"{label} {metrics[name]:.4g}" for name, label in SHOWN.items() if name in metrics]
    if TOKENS_PER_SEC in metrics:
        parts.append(f"{metrics[TOKENS_PER_SEC]:,.0f} tokens/s")
    for name, value in validation.items():
        kind, _, rest = name.partition("/")
        if kind + "/" == EVALUATION and not rest.endswith(("_low", "_high")):
            parts.append(f"{rest} {value:.4g}")
        elif kind + "/" == VALIDATION and rest in SHOWN.values():
            parts.append(f"held-out {rest} {value:.4g}")
    return _joined(*parts)


def _phases(metrics: Mapping[str, float]) -> str:
    """Formats the time per phase of a step, the costliest first, and the rest of the step if no phases overlap."""
    total = metrics.get(TIMING + "total", 0.0)
    phases = [item for item in metrics.items() if item[0].startswith(TIMING) and item[0] not in SPANS]
    rest = total - sum(seconds for _, seconds in phases)
    phases += [("other", rest)] if rest > LEAST_REST * total else []
    ordered = sorted(phases, key=lambda item: -item[1])
    return _joined(*(f"{name.removeprefix(TIMING)} {value:.2f} s" for name, value in ordered))


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


def _time_table(phase_seconds: Mapping[str, float], wall: float, launch: float) -> Table:
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
    if launch:
        table.add_row("launch to first step", f"{launch:.1f}", "", "")
    return table


def _path_table(paths: Mapping[str, Path]) -> Table:
    table = Table(title="Written", title_justify="left", title_style="bold", show_header=False, box=None)
    for name, path in paths.items():
        table.add_row(name, Text(str(path), overflow="fold"))
    return table
