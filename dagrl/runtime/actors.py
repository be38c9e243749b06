"""Starts the actors of a worker group: their resources, their environment, and spare processes for lost ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from dagrl.errors import DeadlineError
from dagrl.runtime.deadline import within
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.lease import ask_lease
from dagrl.runtime.phase import Role, group_transports, methods_of
from dagrl.runtime.spares import Spares, answer, take_place
from dagrl.runtime.worker import WorkerContext

ANSWER_S = 5.0
"""How long Ray has to say which resources are free."""

HEALTH = "dagrl_health"
"""Concurrency group with one thread, on which a worker answers while its other threads are busy."""

ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Lets a process see all GPUs of its host. A spare learns later which one it uses."""


class GpuBundles:
    """Whole GPUs reserved from Ray. The workers of equal rank of several groups share one.

    With an `owner` (`dagrl.runtime.lease`) they stay reserved as long as it lives, else as long as this process.
    """

    def __init__(self, count: int, timeout_s: float, owner: ActorHandle | None = None) -> None:
        self._owner = owner
        self.free: list[Any] = []
        """Placements of workers that have left."""
        self._groups: list[Any] = []
        self._places = self._reserve(count, timeout_s)

    def of(self, rank: int) -> PlacementGroupSchedulingStrategy:
        return self._places[rank]

    def add(self, count: int, timeout_s: float) -> None:
        """Reserves GPUs for `count` more ranks: first those of workers that have left."""
        missing = max(0, count - len(self.free))
        reserved = self._reserve(missing, timeout_s) if missing else []
        self._places += [*self.free[:count], *reserved]
        del self.free[:count]

    def keep(self, ranks: Sequence[int]) -> None:
        """Makes `ranks` the ranks from 0 on; the GPUs of others are free for `add`."""
        self.free += [place for rank, place in enumerate(self._places) if rank not in ranks]
        self._places = [self._places[rank] for rank in ranks]

    def release(self) -> None:
        while self._groups:
            remove_placement_group(self._groups.pop())

    def _reserve(self, count: int, timeout_s: float) -> list[PlacementGroupSchedulingStrategy]:
        wanted = [{"GPU": 1.0}] * count, "PACK"
        owner = self._owner
        group = placement_group(*wanted) if owner is None else ask_lease(owner.reserve.remote(*wanted), timeout_s)
        if not group.wait(timeout_s):
            remove_placement_group(group)
            raise DeadlineError(
                f"Ray did not have {count} free GPUs within timeouts.start_s = {timeout_s:g} s; use smaller layouts, or wait"
            )
        self._groups.append(group)
        return [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index) for index in range(count)]


@dataclass(frozen=True)
class Resources:
    """What one worker requests from Ray, from `bundles` if given. `graphs`: compiled graphs alive on it at once, at most.

    Workers end with `owner` (`dagrl.runtime.lease`), or with this process if that is None.
    """

    num_cpus: float = 0
    num_gpus: float = 0
    graphs: int = 12
    bundles: GpuBundles | None = None
    owner: ActorHandle | None = None


@dataclass(frozen=True)
class WorkerLocation:
    """The host and process of a worker, and the GPUs that Ray assigned it."""

    host: str
    pid: int
    node: str  # Ray's node id
    gpus: tuple[str, ...] = ()


@dataclass
class ActorStarter:
    """Starts actors of `worker_class` for the ranks of one group. `spares`: processes that its `pool` keeps on each node."""

    worker_class: type
    role: str
    layout: ParallelLayout
    config: object
    resources: Resources
    seed: int
    collective_timeout_s: float
    start_timeout_s: float
    spares: int = 0
    pool: Spares = field(init=False)

    def __post_init__(self) -> None:
        cls, config = self.worker_class, self.config
        self._environment: dict[str, str] = cls.environment(config) if hasattr(cls, "environment") else {}
        self._actor_class: Any = ray.remote(
            num_cpus=self.resources.num_cpus,
            num_gpus=self.resources.num_gpus,
            max_restarts=0,
            concurrency_groups={"_ray_system": self.resources.graphs, HEALTH: 1},
            runtime_env={"env_vars": self._environment},
        )(cls)
        self.pool = Spares(self._start_spare, self.spares)

    @property
    def traced(self) -> Role:
        """The group's role as phases trace it."""
        return Role(self.role, self.layout, methods_of(self.worker_class), group_transports(self.resources.num_gpus))

    def start(self, rank: int) -> ActorHandle:
        """Starts the actor of a rank, which constructs its worker."""
        bundles = self.resources.bundles
        return self._create(rank, {} if bundles is None else {"scheduling_strategy": bundles.of(rank)})

    def shortage(self) -> str:
        """What to add to the error of a late start: that Ray has no GPU for another worker. Empty if it has one."""
        if self.resources.bundles is not None or not self.resources.num_gpus:
            return ""
        try:
            found = within(ANSWER_S, lambda: (ray.available_resources(), ray.cluster_resources()), "ray-resources")
        except TimeoutError:
            return ""
        free, total = (resources.get("GPU", 0.0) for resources in found)
        if free >= self.resources.num_gpus:
            return ""
        return (
            f". Ray has {free:g} of the cluster's {total:g} GPUs free, and a worker starts when it has "
            f"{self.resources.num_gpus:g}: wait for other jobs, or use smaller layouts. If no job uses the GPUs, Ray has "
            "lost count of them: start it again"
        )

    def _create(self, rank: int, options: dict[str, Any]) -> ActorHandle:
        owner, arguments = self.resources.owner, (self.context(rank), self.config)
        if owner is None:
            return self._actor_class.options(**options).remote(*arguments)
        return ask_lease(owner.create.remote(self._actor_class, options, arguments), self.start_timeout_s)

    def take_over(self, rank: int, place: WorkerLocation) -> ActorHandle | None:
        """Gives the place of a lost worker to a spare of its node. Returns None if there is none."""
        spare = self.pool.take(place.node)
        if spare is not None:
            context, wait_s = self.context(rank), self.start_timeout_s
            spare.__ray_call__.remote(take_place, context, self.config, place.gpus, place.pid, wait_s)
        return spare

    def _start_spare(self, node: str) -> tuple[ActorHandle, Any]:
        variables = {"env_vars": self._environment | (ALL_GPUS if self.resources.num_gpus else {})}
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_gpus": 0, "scheduling_strategy": there, "runtime_env": variables}
        spare = self._create(0, options)
        prepares = "prepare" in methods_of(self.worker_class)
        return spare, spare.prepare.remote() if prepares else spare.__ray_call__.remote(answer)

    def context(self, rank: int) -> WorkerContext:
        return WorkerContext(self.role, rank, self.layout, self.seed, self.collective_timeout_s)
