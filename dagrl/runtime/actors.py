"""Starts the actors of a worker group: their resources and their environment."""

from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dagrl.errors import DeadlineError
from dagrl.runtime.deadline import within
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Role, group_transports, methods_of
from dagrl.runtime.worker import WorkerContext

ANSWER_S = 5.0  # deadline for Ray to say which resources are free
HEALTH = "dagrl_health"  # concurrency group with one thread, on which a worker answers while its other threads are busy


class GpuBundles:
    """Whole GPUs reserved from Ray. The workers of equal rank of several groups share one."""

    def __init__(self, count: int, timeout_s: float) -> None:
        self._group = placement_group([{"GPU": 1.0}] * count, "PACK")
        if not self._group.wait(timeout_s):
            self.release()
            raise DeadlineError(
                f"Ray did not have {count} free GPUs within timeouts.start_s = {timeout_s:g} s; use smaller layouts, or wait"
            )

    def of(self, rank: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)

    def release(self) -> None:
        remove_placement_group(self._group)


@dataclass(frozen=True)
class Resources:
    """The resources that a worker requests from Ray, from `bundles` if given. `graphs`: most compiled graphs alive on it."""

    num_cpus: float = 0
    num_gpus: float = 0
    graphs: int = 12
    bundles: GpuBundles | None = None


@dataclass
class ActorStarter:
    """Starts actors of `worker_class` for the ranks of one group."""

    worker_class: type
    role: str
    layout: ParallelLayout
    config: object
    resources: Resources
    seed: int
    collective_timeout_s: float
    py_executable: str | None = None

    def __post_init__(self) -> None:
        cls, config = self.worker_class, self.config
        environment: dict[str, object] = {"env_vars": cls.environment(config) if hasattr(cls, "environment") else {}}
        if self.py_executable is not None:
            environment["py_executable"] = self.py_executable
        self._actor_class: Any = ray.remote(
            num_cpus=self.resources.num_cpus,
            num_gpus=self.resources.num_gpus,
            max_restarts=0,
            concurrency_groups={"_ray_system": self.resources.graphs, HEALTH: 1},
            runtime_env=environment,
        )(cls)

    @property
    def traced(self) -> Role:
        """The group's role as phases trace it."""
        return Role(self.role, self.layout, methods_of(self.worker_class), group_transports(self.resources.num_gpus))

    def start(self, rank: int) -> ActorHandle:
        """Starts the actor of a rank, which constructs its worker."""
        context = WorkerContext(self.role, rank, self.layout, self.seed, self.collective_timeout_s)
        bundles = self.resources.bundles
        options = {} if bundles is None else {"scheduling_strategy": bundles.of(rank)}
        actor: ActorHandle = self._actor_class.options(**options).remote(context, self.config)
        return actor

    def shortage(self) -> str:
        """Returns what to add to the error of a late start if Ray has no GPU for another worker; empty if it has one."""
        if self.resources.bundles is not None or not self.resources.num_gpus:
            return ""
        try:
            both = within(ANSWER_S, lambda: (ray.available_resources(), ray.cluster_resources()), "ray-resources")
        except TimeoutError:
            return ""
        free, total = (resources.get("GPU", 0.0) for resources in both)
        if free >= self.resources.num_gpus:
            return ""
        return (
            f". Ray has {free:g} of the cluster's {total:g} GPUs free, and a worker starts when it has "
            f"{self.resources.num_gpus:g}: wait for other jobs, or use smaller layouts. If no job uses the GPUs, Ray has "
            "lost count of them: start it again"
        )
