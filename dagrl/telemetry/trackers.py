"""Trackers of metrics besides `metrics.jsonl`: TensorBoard and Weights & Biases, or both.

Each is switched on by `logger.<name>_enabled`. A resumed run continues in the tracker's own run, whose id is kept in the
run's directory. Metrics of stage `grpo` are named `grpo/<metric>`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from dagrl.config import Config
from dagrl.errors import error_text
from dagrl.files import naming, write_whole

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]


class Tracker(Protocol):
    """Receives the metrics of each step."""

    def __init__(self, config: Config, directory: Path, resumed_step: int) -> None: ...

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


def open_trackers(config: Config, directory: Path, resumed_step: int) -> list[Tracker]:
    """Opens the enabled trackers of the run in `directory`. One that fails is left out if the run resumes or restarts."""
    opened: list[Tracker] = []

    def open_one(kind: type[Tracker]) -> None:
        opened.append(kind(config, directory, resumed_step))

    for kind in (TRACKERS[name] for name in TRACKERS if getattr(config.logger, f"{name}_enabled")):
        if config.checkpointing.resume:
            attempt(kind, partial(open_one, kind))
        else:
            open_one(kind)
    return opened


def attempt(kind: type[Tracker], act: Callable[[], None]) -> bool:
    """Calls `act` of a tracker; returns whether it succeeded. Raises errors that name a file, such as a full disk."""
    try:
        act()
    except Exception as error:  # those of a tracker's package are not known
        if isinstance(error, OSError) and error.filename:
            raise
        text = "the run goes on without %s, which failed: %s. metrics.jsonl has all steps"
        logger.warning(text, kind.__name__, error_text(error))
        return False
    return True


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


TRACKERS: Mapping[str, type[Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}
"""Trackers by the name of their package, which is that of their key `logger.<name>_enabled`."""
