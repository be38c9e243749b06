"""Saves the checkpoints of a run: what the train workers write, and what the driver writes.

With `checkpointing.async_save` the workers copy their state and write it during training. The checkpoint is published
at the end of the first step by which every worker has written its part. The next save and the end of the run wait for it, at
most `timeouts.checkpoint_s`.
"""

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dagrl.config import Config, Json
from dagrl.config.roles import GENERATION
from dagrl.config.settings import algorithm_name
from dagrl.errors import CheckpointError, ConfigError
from dagrl.files import FileEntry, discarding, verify_files
from dagrl.run.checkpoint_store import Checkpoint, CheckpointStore, TrainState, large_files
from dagrl.run.replays import Replays
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.metrics import VALIDATION


@dataclass
class Checkpoints:
    """The state after the last finished step, and its checkpoints in `store`, of which one is saved at a time.

    Each of `groups` writes its state into a directory of its role's name. `show` displays what the driver is doing.
    """

    config: Config
    store: CheckpointStore
    groups: Mapping[str, WorkerGroup]
    replays: Replays
    show: Callable[[str], None]
    resumed: Checkpoint | None = None
    state: TrainState = field(default_factory=lambda: TrainState(step=0))
    saved_step: int = 0
    _pending: tuple[TrainState, Path, dict[str, FileEntry]] | None = field(default=None, init=False)

    def restore(self) -> None:
        """Takes the state that the run resumes from, if any, and loads it into the train workers."""
        if self.resumed is None:
            return
        self.state = self.resumed.state
        for role, group in self.groups.items():
            self._hold(role)
            load_role(group, role, self.resumed.directory, self.config.timeouts.checkpoint)
        self.saved_step = self.state.step

    def resumed_in(self, counter: str) -> Checkpoint | None:
        """Returns the checkpoint that the run resumes from, if it was saved by a loop that keeps this counter."""
        return self.resumed if counter in self.state.counters else None

    def add_counters(self, counters: Mapping[str, Json]) -> None:
        """Adds the counters of a loop that begins to the state."""
        self.state = replace(self.state, counters={**self.state.counters, **counters})

    def due(self, step: int) -> bool:
        """Returns whether `finish_step` saves this step: every `checkpointing.save_period` steps."""
        config = self.config.checkpointing
        return config.enabled and step % config.save_period == 0

    def finish_step(self, state: TrainState) -> None:
        """Takes the state after a finished step, and saves it if it is `due`.

        Publishes the pending checkpoint if all workers have written it.
        """
        self.state = state
        if self._pending is not None and all(all(self._call(group, "checkpoint_written")) for group in self.groups.values()):
            self._finish()
        if self.due(state.step):
            self.save()

    def save(self) -> None:
        """Saves the last finished step, unless it is saved already. With `async_save` workers still write on return."""
        if self.state.step in (0, self.saved_step):
            return
        self.show("saving a checkpoint")
        self._hold("train")
        with self.replays.clock.measure("checkpoint"):
            self._finish()
            self._write()
        self.saved_step = self.state.step
        self.replays.times.exclude_wait(GENERATION)

    def save_last(self) -> None:
        """Saves the last finished step, unless it is saved already, and waits until the checkpoint is complete."""
        self.save()
        with self.replays.clock.measure("checkpoint"):
            self._finish()

    def explain(self, error: OSError) -> None:
        """Raises CheckpointError if the disk is full while workers write a checkpoint, which is removed then."""
        if self._pending is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
            (_, directory, _), self._pending = self._pending, None
            with discarding(directory):
                raise CheckpointError(
                    f"{error.filename}: {error.strerror}, while train workers wrote {directory}, now removed; make room "
                    "there, or name another output_dir"
                ) from error

    def _write(self) -> None:
        """Writes all parts; with `async_save`, workers go on writing theirs."""
        directory, files = self.store.begin(self.state), dict[str, FileEntry]()
        with discarding(directory):
            for role in self.groups:
                self._hold(role)
                background = [True] if self.config.checkpointing.async_save else []
                files |= self._files(role, "save_checkpoint", str(directory / role), *background)
        self._pending = (self.state, directory, files)
        if not self.config.checkpointing.async_save:
            self._finish()

    def _finish(self) -> None:
        """Publishes the pending checkpoint; waits for workers that still write."""
        if self._pending is None:
            return
        (state, directory, files), self._pending = self._pending, None
        with discarding(directory):
            if self.config.checkpointing.async_save:
                for role in self.groups:
                    files |= self._written(role)
            for name in (*self.groups, *files):
                require_shared(directory / name)
        self.store.publish(state, directory, files)

    def _written(self, role: str) -> dict[str, FileEntry]:
        """Waits for a role's part. Raises DeadlineError if it is not written because a worker does not answer."""
        try:
            return self._files(role, "finish_checkpoint")
        except CheckpointError:
            self._call(self.groups[role], "checkpoint_written")
            raise

    def _files(self, role: str, method: str, *arguments: object) -> dict[str, FileEntry]:
        """Calls a method that writes a role's part. Returns the files that workers know, by their path in the checkpoint."""
        answers = self._call(self.groups[role], method, *arguments)
        return {f"{role}/{name}": entry for files in answers for name, entry in (files or {}).items()}

    def _hold(self, role: str) -> None:
        """Moves the role's memory to the GPU, where groups share GPUs."""
        self.replays.hold(role, keep_generation_weights=True)

    def _call(self, group: WorkerGroup, method: str, *arguments: object) -> list[Any]:
        return group.call(method, *arguments, deadline=self.config.timeouts.checkpoint)


def load_role(group: WorkerGroup, role: str, checkpoint: Path, deadline: Deadline) -> None:
    """Loads a role's part of a verified checkpoint into its workers. Each first verifies a share of the large files."""
    files, workers = list(large_files(checkpoint, role).items()), group.actors
    if files:
        shares = [dict(files[rank :: len(workers)]) for rank in range(len(workers))]
        refs = [
            actor.__ray_call__.remote(_verify_share, checkpoint, share) for actor, share in zip(workers, shares, strict=True)
        ]
        group.wait(refs, deadline, "verify_files")
    group.call("load_checkpoint", str(checkpoint / role), deadline=deadline)


def _verify_share(_: object, checkpoint: Path, files: Mapping[str, FileEntry]) -> None:
    """Runs in a worker."""
    verify_files(checkpoint, files)


def ranking_metric(config: Config, stage: str, metrics: Mapping[str, float]) -> float | None:
    """Returns `checkpointing.metric_name`, which ranks checkpoints; None if this step did not measure it.

    Raises ConfigError if a validation, or a step that trained, lacks a metric that it should have measured.
    """
    name = config.checkpointing.metric_name
    if name is None:
        return None
    validated = any(key.startswith(VALIDATION) for key in metrics)
    due = validated if name.startswith(VALIDATION) else "loss" in metrics
    if due and name not in metrics and stage == algorithm_name(config):
        raise ConfigError(
            f"checkpointing.metric_name is {name!r}, but a step of {stage} has no such metric; it has: "
            f"{', '.join(sorted(metrics))}"
        )
    return metrics.get(name)


def require_shared(path: Path) -> None:
    """Raises CheckpointError unless the driver sees the `path` that the workers wrote."""
    if not path.exists():
        raise CheckpointError(
            f"train workers wrote {path}, but the driver does not find it: their hosts do not share this directory. "
            "Put output_dir on a file system that all hosts share"
        )
