"""Fixtures shared by all tests: one local Ray cluster, started only when a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from dagrl.cluster import ray_cluster
from dagrl.config import ClusterConfig

# Machines that run tests are shared; how long one example took says nothing of the code. pytest-timeout bounds a whole test.
hypothesis.settings.register_profile("dagrl", deadline=None)
hypothesis.settings.load_profile("dagrl")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist: unit tests in one process, all others, which share a Ray cluster and workers, in another."""
    from xdist.scheduler import LoadScopeScheduling

    class UnitTestsApart(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "unit" if nodeid.startswith("tests/unit/") else "cluster"

    return UnitTestsApart(config, log)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local Ray cluster for the whole session."""
    with ray_cluster(ClusterConfig(num_cpus=4), {"OMP_NUM_THREADS": "1"}):
        yield
