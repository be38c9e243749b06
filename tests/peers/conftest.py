"""Tests with real verl, in an environment of its own (`make test-peers`). Elsewhere nothing here is collected."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagrl.bench.verl_steps import ON_CPU, write_model
from dagrl.config import ClusterConfig
from dagrl.run.cluster import ray_cluster

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]

os.environ.update(ON_CPU)  # before verl is imported


@pytest.fixture(scope="session")
def verl_cluster() -> Iterator[None]:
    """A local Ray cluster with the resources that verl's pools ask for: ten CPUs per worker."""
    environment = ON_CPU | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with ray_cluster(ClusterConfig(num_cpus=200), environment):
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))
