"""Saves checkpoints of a run: the workers' part and the driver's, at once or beside training.

With `checkpointing.async_save` the workers copy their state, and write it while the run goes on; the checkpoint gets its
name at the end of the first step by which all have written. A later save, and the end of the run, wait for it, at most
`timeouts.checkpoint_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dagrl.checkpoint import CheckpointStore, TrainState
from dagrl.config import Config
from dagrl.errors import CheckpointError
from dagrl.worker_group import WorkerGroup

DriverPart = Callable[[Path], None]
"""Writes a part of a checkpoint that the driver has into its directory."""


@dataclass
class CheckpointSaver:
    """Saves one checkpoint after the other into `store`."""

    config: Config
    store: CheckpointStore
    train: WorkerGroup
    _pending: tuple[TrainState, Path] | None = field(default=None, init=False)

    def save(self, state: TrainState, parts: Sequence[DriverPart]) -> None:
        """Save `state` and what the train workers hold; with `async_save` the workers are still writing on return."""
        self.finish()
        background = self.config.checkpointing.async_save
        with self.store.writing(state) as directory:
            arguments = (str(directory / "train"), {}, *([True] if background else []))
            self.train.call("save_checkpoint", *arguments, deadline=self.config.timeouts.checkpoint)
            for write in parts:
                write(directory)
        if background:
            self._pending = (state, directory)
        else:
            self._publish(state, directory)

    def poll(self) -> None:
        """Complete a checkpoint that all workers have written."""
        deadline = self.config.timeouts.checkpoint
        if self._pending is not None and all(self.train.call("checkpoint_written", deadline=deadline)):
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        if self._pending is None:
            return
        (state, directory), self._pending = self._pending, None
        with self.store.discarding(directory):
            self.train.call("finish_checkpoint", deadline=self.config.timeouts.checkpoint)
        self._publish(state, directory)

    def _publish(self, state: TrainState, directory: Path) -> None:
        with self.store.discarding(directory):
            require_shared(directory / "train")
        self.store.publish(state, directory)


def require_shared(path: Path) -> None:
    """Raise CheckpointError unless the driver has at `path` what the workers have written there."""
    if not path.exists():
        raise CheckpointError(
            f"train workers have written {path}, but the driver finds nothing there: their hosts share no such directory. "
            "Let output_dir, and checkpointing.checkpoint_dir if it is set, be on a file system that all hosts have"
        )
