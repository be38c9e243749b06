"""The run directory, its saved configuration and its metrics.

    runs/<name>/
      config.yaml      the resolved configuration
      metrics.jsonl    one line per step, flushed after each
      tensorboard/     the same metrics as TensorBoard events
      rollouts/        the samples of each step (see `dagrl.telemetry.rollouts`)
      trace.json       timeline of all workers (see `dagrl.telemetry.trace`)
      checkpoints/     to resume from (see `dagrl.run.checkpoint_store`)
      final_model/     the last policy as Hugging Face safetensors
      init_model/      the model made by `policy.random_init`
      tokenizer/       the tokenizer of engines that look for stop strings

Use:

    with lock_run(RunPaths.of(config)):
        paths = prepare_run_directory(config)
        with RunRecord(config, resumed_step=0) as record:
            record.log(step, "grpo", {"loss": 0.1, "reward/mean": 0.4, "timing_s/generate": 0.8})
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dagrl.config import Config, LoggerConfig
from dagrl.config.file import dump_config
from dagrl.config.plan import LearnsFrom
from dagrl.config.settings import algorithm_name
from dagrl.errors import ConfigError, error_text
from dagrl.files import PART, PRIVATE, free_name, locked, move_aside, naming, write_whole
from dagrl.imports import require_package

Metrics = Mapping[str, float]

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Receives the metrics of each step."""

    def __init__(self, config: Config, directory: Path, resumed_step: int) -> None: ...

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


def open_trackers(config: Config, directory: Path, resumed_step: int) -> list[Tracker]:
    """Opens the enabled trackers of the run in `directory`. One that fails is left out if the run resumes or restarts."""
    opened: list[Tracker] = []
    for kind in (TRACKERS[name] for name in TRACKERS if getattr(config.logger, f"{name}_enabled")):
        with attempted(kind) if config.checkpointing.resume else nullcontext():
            opened.append(kind(config, directory, resumed_step))
    return opened


@contextmanager
def attempted(kind: type[Tracker]) -> Iterator[None]:
    """Warns of errors of a tracker in the block, except those that name a file, such as a full disk."""
    try:
        yield
    except Exception as error:  # those of a tracker's package are not known
        if isinstance(error, OSError) and error.filename:
            raise
        text = "the run goes on without %s, which failed: %s. metrics.jsonl has all steps"
        logger.warning(text, kind.__name__, error_text(error))


class TensorBoardTracker:
    """Writes TensorBoard events, without torch's writer, for which the driver would import torch."""

    def __init__(self, config: Config, directory: Path, resumed_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._directory = directory / "tensorboard"
        with naming(self._directory):
            self._writer = EventFileWriter(str(self._directory))
            start = SessionLog(status=SessionLog.START)  # hides the steps that are repeated
            self._writer.add_event(Event(wall_time=time.time(), step=resumed_step + 1, session_log=start))

    def log(self, step: int, metrics: Metrics) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        with naming(self._directory):
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
            self._writer.flush()

    def close(self) -> None:
        with naming(self._directory):
            self._writer.close()


class WandbTracker:
    """Logs to Weights & Biases. `WANDB_MODE=offline` keeps it on this machine, to be sent by `wandb sync`."""

    def __init__(self, config: Config, directory: Path, resumed_step: int) -> None:
        import wandb

        section, saved = config.logger.wandb, directory / "wandb_id"
        if not saved.exists():
            write_whole(saved, uuid.uuid4().hex)
        self._run = wandb.init(
            project=section.project,
            name=section.name or config.name,
            id=saved.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(directory),
            config=config.model_dump(mode="json"),
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: Mapping[str, type[Tracker]] = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}
"""Trackers by the name of their package, which is that of their key `logger.<name>_enabled`."""


@dataclass(frozen=True)
class _Below:
    """A property of `RunPaths`: a path in the run's directory."""

    name: str

    def __get__(self, paths: RunPaths, owner: type[RunPaths]) -> Path:
        return paths.directory / self.name


@dataclass(frozen=True)
class RunPaths:
    """The paths that a run writes. They are absolute, because workers have other working directories."""

    directory: Path

    @classmethod
    def of(cls, config: Config) -> RunPaths:
        """Returns the paths of the run of `config`. Creates nothing."""
        return cls(Path(config.output_dir).absolute() / config.name)

    config = _Below("config.yaml")
    metrics = _Below("metrics.jsonl")
    tensorboard = _Below("tensorboard")
    rollouts = _Below("rollouts")
    media = _Below("media")
    trace = _Below("trace.json")
    checkpoints = _Below("checkpoints")
    final_model = _Below("final_model")
    init_model = _Below("init_model")

    def written(self) -> dict[str, Path]:
        """Returns the existing paths by display name."""
        named = {
            "configuration": self.config,
            "metrics": self.metrics,
            "TensorBoard": self.tensorboard,
            "rollouts": self.rollouts,
            "trace": self.trace,
            "checkpoints": self.checkpoints,
            "final model": self.final_model,
        }
        return {name: path for name, path in named.items() if path.exists()}


@contextmanager
def lock_run(paths: RunPaths, *, existing: bool = False) -> Iterator[None]:
    """Locks the run's directory against other runs during the block.

    The lock file is next to it, as a run may rename the directory. `existing`: takes the lock only if its file exists, to
    see whether the run is under way. Raises ConfigError if another run holds it.
    """
    file = paths.directory.with_name(f".{paths.directory.name}.lock")
    advice = "let that run end first, or choose another name or output_dir"
    with locked(file, str(paths.directory), advice) if file.exists() or not existing else nullcontext():
        yield


def prepare_run_directory(config: Config, derived: Mapping[str, str] | None = None) -> RunPaths:
    """Creates the run's directory and saves the resolved configuration in it, with the reasons of `derived` keys.

    Renames the directory of an earlier run of that name to `<name>.1`, unless this one resumes it. Raises ConfigError like
    `check_run_directory`. Keeps a copy of a different configuration. There is always a config.yaml, which marks the
    directory as a run's.
    """
    paths = RunPaths.of(config)
    check_run_directory(paths)
    if paths.config.exists() and not config.checkpointing.resume:
        logger.info("renamed the directory of the earlier run to %s", move_aside(paths.directory))
    paths.directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    content = dump_config(config, derived)
    if paths.config.exists() and paths.config.read_text(encoding="utf-8") != content:
        shutil.copyfile(paths.config, free_name(paths.config))
    write_whole(paths.config, content)
    return paths


@contextmanager
def put_back_config(path: Path) -> Iterator[ExitStack]:
    """Restores a run's saved configuration after the block, unless the yielded stack has been cleared (`pop_all`)."""
    with ExitStack() as undo:
        undo.callback(write_whole, path, path.read_text(encoding="utf-8"))
        yield undo


def check_run_directory(paths: RunPaths) -> None:
    """Raises ConfigError if the directory is neither a run's nor left by a start that was killed."""
    if not paths.directory.exists() or paths.config.exists():
        return
    if any(path.suffix != PART for path in paths.directory.iterdir()):
        raise ConfigError(f"{paths.directory} exists and is not a run; choose another name or output_dir")


def require_extras(config: LoggerConfig) -> None:
    """Raises MissingDependencyError if the configuration needs a package that is not installed."""
    for name in TRACKERS:
        if getattr(config, f"{name}_enabled"):
            require_package(name, f"logger.{name}_enabled", otherwise=f", or set logger.{name}_enabled=false")


class RunRecord:
    """Writes a run's metrics to `metrics.jsonl` and to the configured trackers.

    A run that resumes from `resumed_step` drops the lines of `metrics.jsonl` whose steps or validations it repeats. It goes
    on without a tracker that fails, such as one whose server is down.
    """

    def __init__(self, config: Config, *, resumed_step: int = 0, learns_from: LearnsFrom = "samples") -> None:
        require_extras(config.logger)
        self.paths = RunPaths.of(config)
        _truncate(self.paths.metrics, resumed_step, config, learns_from)
        self._file = self.paths.metrics.open("a", encoding="utf-8")
        self._trackers = open_trackers(config, self.paths.directory, resumed_step)

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, *exception: object) -> None:
        with ExitStack() as stack:  # closes each, whatever another one raises
            stack.enter_context(naming(self.paths.metrics))
            stack.callback(self._file.close)
            for tracker in self._trackers:
                stack.enter_context(attempted(type(tracker)))
                stack.callback(tracker.close)

    def log(self, step: int, stage: str, metrics: Metrics) -> None:
        """Records one step.

        `step` counts from 1 over all stages of the run, `stage` is `sft` or `grpo`. Names are those of
        `dagrl.telemetry.metrics`. In `metrics.jsonl`, which is strict JSON, numbers that are not finite become null.
        """
        clean = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        line = {"step": step, "stage": stage, "time": round(time.time(), 3), **clean}
        with naming(self.paths.metrics):
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        named = {f"{stage}/{name}": value for name, value in metrics.items()}
        logged = []
        for tracker in self._trackers:
            with attempted(type(tracker)):
                tracker.log(step, named)
                logged.append(tracker)
        self._trackers = logged


def read_metrics(path: Path) -> list[dict[str, float | str | None]]:
    """Returns the lines of a `metrics.jsonl`, without a last line truncated by a crash."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # text after the last newline is incomplete


def _truncate(path: Path, step: int, config: Config, learns_from: LearnsFrom) -> None:
    """Keeps the lines of `path` up to `step`, without a validation at `step` that the stage repeats at its start."""
    if not path.exists():
        return
    first = (0, (config.preference if learns_from == "preferences" else config.sft).val_at_start)
    again = {"sft": first, algorithm_name(config): first}
    if learns_from == "samples":
        again[algorithm_name(config)] = config.sft.max_num_steps, config.grpo.val_at_start

    def keeps(line: Mapping[str, float | str | None]) -> bool:
        at, stage = line["step"], str(line["stage"])
        return isinstance(at, int | float) and at <= step and not (at == step and again.get(stage) == (at, True))

    write_whole(path, "".join(json.dumps(line) + "\n" for line in read_metrics(path) if keeps(line)))
