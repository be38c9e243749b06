"""Fixtures shared by all tests: one local Ray cluster, started only when a test asks for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from dagrl.config import ClusterConfig
from dagrl.run.cluster import ray_cluster

INDEPENDENT = (
    "async_grpo",
    "bench_step",
    "channel_gloo",
    "embed_example",
    "embed_nemo_rl",
    "environments",
    "foreign_actors",
    "own_algorithm",
    "refit_layouts",
    "replay_growth",
    "vllm_families",
    "wheel",
)
APART = ("tests/unit/", *(f"tests/integration/test_{name}.py" for name in INDEPENDENT))
"""Tests of one of two processes: about half by time, of those that share no pool of workers with the others."""

# Ray runs its workers at niceness 15, where they would wait for whatever the tests of the other process do.
os.environ["RAY_worker_niceness"] = "0"

# A call to Ray that no cluster serves is an error; Ray would start one, and end this process a minute after that has ended.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

# Machines that run tests are shared: the time to draw or run one example says nothing about the code.
# pytest-timeout bounds a whole test.
hypothesis.settings.register_profile("dagrl", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("dagrl")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist: tests that share no worker pools run in one process, all others in another."""
    from xdist.scheduler import LoadScopeScheduling

    class InTwo(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "apart" if nodeid.startswith(APART) else "together"

    return InTwo(config, log)


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Commands set the level of their process, which here goes on with other tests."""
    ours = logging.getLogger("dagrl")
    level, propagate, handlers = ours.level, ours.propagate, list(ours.handlers)
    yield
    ours.setLevel(level)
    ours.propagate, ours.handlers[:] = propagate, handlers


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local Ray cluster for the whole session."""
    with ray_cluster(ClusterConfig(num_cpus=4), {"OMP_NUM_THREADS": "1"}):
        yield
