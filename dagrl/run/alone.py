"""One worker group without a run: for `dagrl evaluate` and `dagrl export`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dagrl.config import Config
from dagrl.config.settings import layouts
from dagrl.run.cluster import gpus_per_worker, ray_cluster
from dagrl.run.preflight import worker_classes
from dagrl.run.worker_protocols import required_protocols
from dagrl.runtime.actors import Resources
from dagrl.runtime.worker_group import WorkerGroup, shutdown_groups


@contextmanager
def worker_group(config: Config, role: str) -> Iterator[WorkerGroup]:
    """Starts Ray and the workers of `role`, each on GPUs of its own, and ends both after the block."""
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(config.cluster, teardown_s=config.timeouts.teardown_s))
        groups: list[WorkerGroup] = []
        stack.callback(shutdown_groups, groups, config.timeouts.teardown_s / 2)
        groups.append(
            WorkerGroup.create(
                role,
                worker_classes(config)[role],
                layouts(config)[role],
                config,
                protocols=required_protocols(config)[role],
                resources=Resources(num_gpus=gpus_per_worker(config.cluster)),
                seed=config.seed,
                start_timeout_s=config.timeouts.start_s,
                collective_timeout_s=config.timeouts.collective_s,
            )
        )
        yield groups[0]
