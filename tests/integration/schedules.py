"""Groups, actors and schedulers as tests of the runtime begin with them, and their ends."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Phase
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.runtime.worker_group import WorkerGroup


@contextmanager
def group_of(worker: type, role: str = "train", config: object = None, **sizes: int) -> Iterator[WorkerGroup]:
    """Yields a group of workers of a class. `sizes`: those of its layout."""
    group = WorkerGroup.create(role, worker, ParallelLayout(**sizes), config)
    try:
        yield group
    finally:
        group.shutdown(2.0)


@contextmanager
def actors_of(
    worker: type, arguments: Sequence[tuple[Any, ...]] = ((), ()), *, groups: Mapping[str, int] | None = None, **options: Any
) -> Iterator[list[Any]]:
    """Yields actors of a class, one for each of `arguments`. `groups`: their concurrency groups."""
    made = ray.remote(num_cpus=0, concurrency_groups=dict(groups or {}))(worker)
    actors = [made.options(**options).remote(*each) for each in arguments]
    yield actors
    for actor in actors:
        ray.kill(actor)


@contextmanager
def compiled(
    groups: WorkerGroup | Sequence[WorkerGroup], phases: Mapping[Phase, object], *, warm: bool = True, **options: Any
) -> Iterator[Scheduler]:
    """Yields a scheduler of phases, compiled and (`warm`) warmed up with these values. Nothing falls back to eager calls."""
    groups = [groups] if isinstance(groups, WorkerGroup) else groups
    with Scheduler(groups, SchedulerOptions(**{"fallback": "error", "teardown_s": 5.0, **options})) as scheduler:
        for phase, value in phases.items():
            scheduler.add(phase, warmup_value=value)
        scheduler.compile()
        if warm:
            scheduler.warmup()
        yield scheduler
