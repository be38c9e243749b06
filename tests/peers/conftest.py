"""Tests with real verl, in an environment of its own (`make test-peers`). Elsewhere nothing here is collected."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagrl.config import ClusterConfig
from dagrl.run.cluster import ray_cluster

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]

# verl's FSDP engine on the CPU: see cpu_platform.py. verl reads these when it is imported.
CPU_PLATFORM = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "tests.peers.cpu_platform",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_ENGINE_VENDOR": "nvidia",
}
os.environ.update(CPU_PLATFORM)


@pytest.fixture(scope="session")
def verl_cluster() -> Iterator[None]:
    """A local Ray cluster with the resources that verl's pools ask for: ten CPUs per worker."""
    root = str(Path(__file__).parents[2])
    environment = CPU_PLATFORM | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    with ray_cluster(ClusterConfig(num_cpus=200), environment):
        yield
