"""What the driver knows after each step, on disk, for one that takes its workers over (`timeouts.orphan_s`).

    record = DriverRecord(paths.directory / DIRECTORY)
    record.write(state, parts, next_replays)           # after each step
    taken = go_on(config, groups, record)              # the next driver

It is a checkpoint without the workers' part: data position, step, unfinished groups. It also has the numbers that the next
replays would get. A train worker knows in which replay it last began an update, and the two tell whether it has the weights
of the recorded step.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from dagrl.config import Config, Json
from dagrl.config.roles import CRITIC, TRAIN
from dagrl.config.settings import is_colocated
from dagrl.errors import CheckpointError, DeadlineError, WorkerError
from dagrl.run.checkpoint_store import Checkpoint, CheckpointStore, TrainState
from dagrl.run.checkpoints import DriverPart
from dagrl.run.preflight import load_phase
from dagrl.run.worker_protocols import Handover
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.metrics import StepMetrics, merge_step_metrics

logger = logging.getLogger(__name__)

DIRECTORY = "driver"
NEXT_REPLAYS = "next_replays"
DEMONSTRATIONS = "demonstration_step"


@dataclass(frozen=True)
class Taken:
    """Where a run goes on with the train workers of a driver that died.

    `known`: results of phases that the workers have executed since, by key in `phases`. They are not executed again.
    """

    record: Checkpoint
    next_replays: Mapping[str, int]
    known: Mapping[str, list[StepMetrics]]


class DriverRecord:
    """See the module's docstring. `root` is its directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._store = CheckpointStore(root, keep_last_k=1)

    def write(self, state: TrainState, parts: Sequence[DriverPart], next_replays: Mapping[str, int]) -> None:
        """Replaces the record by that of `state`, as a whole or not at all."""
        numbers: dict[str, Json] = {**next_replays}
        counters = {**state.counters, NEXT_REPLAYS: numbers}
        with self._store.saving(replace(state, counters=counters)) as directory:
            for part in parts:
                part(directory)

    def read(self) -> tuple[Checkpoint, dict[str, int]]:
        """Returns the record and the numbers of the next replays. Raises CheckpointError if this version cannot read one."""
        self._store.recover(resume=True)
        found = self._store.latest()
        if found is None:
            raise CheckpointError("no step was recorded")
        counters = dict(found.state.counters)
        numbers = counters.pop(NEXT_REPLAYS, None)
        if not isinstance(numbers, dict):
            raise CheckpointError(f"{found.directory} has no numbers of replays")
        return replace(found, state=replace(found.state, counters=counters)), cast("dict[str, int]", numbers)

    def clear(self) -> None:
        """Removes the record, before workers get another state."""
        shutil.rmtree(self._root, ignore_errors=True)


def go_on(config: Config, groups: Sequence[WorkerGroup], record: DriverRecord) -> Taken | None:
    """Returns where the run goes on with the state that the train workers of `groups`, which are whole, have.

    None, with the reason in the log, if it goes on from the newest checkpoint.
    """
    try:
        return _taken(config, groups, record)
    except (CheckpointError, WorkerError, DeadlineError) as error:
        logger.warning("the run goes on from its newest checkpoint, with the processes that live: %s", error)
        return None


def _taken(config: Config, groups: Sequence[WorkerGroup], record: DriverRecord) -> Taken:
    by_role = {group.role.name: group for group in groups}
    train = by_role.get(TRAIN)
    if train is None:
        raise CheckpointError("train workers were not ready yet, or have died too")
    if is_colocated(config) or CRITIC in by_role:
        raise CheckpointError("what generation or a critic shares with the train workers is not known")
    if "take_over" not in train.role.methods:
        raise CheckpointError("the train worker class has no take_over")
    checkpoint, numbers = record.read()
    found: list[Handover] = train.call("take_over", deadline=config.timeouts.checkpoint)
    if any(one.update != found[0].update for one in found):
        raise CheckpointError("a step had updated the weights of some workers only")
    if found[0].update is None:
        return Taken(checkpoint, numbers, {})
    phase, number = found[0].update
    first = numbers.get(phase, 0)
    if number < first:
        return Taken(checkpoint, numbers, {})
    ended = number == first and all(one.metrics is not None for one in found)
    if phase != load_phase(config.phases, DEMONSTRATIONS).name or not ended:
        raise CheckpointError(f"step {checkpoint.state.step + 1} had begun to update the weights")
    shards = [[found[rank].metrics for rank in train.layout.shard(shard)] for shard in range(train.layout.dp)]
    metrics = [merge_step_metrics(one for one in shard if one is not None) for shard in shards]
    return Taken(checkpoint, {**numbers, phase: number + 1}, {DEMONSTRATIONS: metrics})
