"""Fixtures shared by all tests: one local Ray cluster, started only when a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from dagrl.cluster import ray_cluster
from dagrl.config import ClusterConfig

# Machines that run tests are shared; how long one example took says nothing of the code. pytest-timeout bounds a whole test.
hypothesis.settings.register_profile("dagrl", deadline=None)
hypothesis.settings.load_profile("dagrl")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With pytest-xdist, unit tests run beside all others, which share a Ray cluster, workers and two cores."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group("unit" if "unit" in item.path.parts else "cluster"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local Ray cluster for the whole session."""
    with ray_cluster(ClusterConfig(num_cpus=4), {"OMP_NUM_THREADS": "1"}):
        yield
