"""Actors that somebody else made, with threads of their own or `async` methods: turns are kept, and nodes their order."""

from __future__ import annotations

import pytest
import ray

from dagrl.errors import GraphError
from dagrl.layout import ParallelLayout
from dagrl.phase import Shard, phase
from dagrl.scheduler import Scheduler
from dagrl.worker_group import WorkerGroup


class Mixed:
    """Some of its methods are `async`."""

    async def later(self, value: int) -> int:
        return value

    def now(self, value: int) -> int:
        return value


@phase
def awaits(train: Shard, value):
    return train.map("later", value)


def test_async_methods_of_foreign_actors_are_refused_when_a_phase_is_added(cluster: None) -> None:
    """Their handles do not tell which methods are `async`."""
    actor = ray.remote(num_cpus=0)(Mixed).remote()
    with Scheduler([WorkerGroup.from_actors([actor], ParallelLayout())]) as scheduler:
        with pytest.raises(GraphError, match="phase 'awaits': node train.later is an `async def`"):
            scheduler.add(awaits, warmup_value=0)
    ray.kill(actor)
