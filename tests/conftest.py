"""Fixtures shared by all tests: one local Ray cluster, started only when a test asks for it."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import hypothesis
import pytest

from dagrl.config import ClusterConfig
from dagrl.run.cluster import ray_cluster

SHARED = {
    "train workers": ("train_", "megatron_", "fsdp_"),
    "vLLM engines": ("vllm_",),
    "learned run": ("main_job", "stop", "own_worker"),
}
"""Starts of the names of integration tests that share processes or a run (tests/integration/conftest.py)."""

# Ray runs its workers at niceness 15, where they would wait for whatever the tests of the other process do.
os.environ["RAY_worker_niceness"] = "0"

# One thread, before torch is imported: with the tensors of tests, more threads mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A call to Ray that no cluster serves is an error; Ray would start one, and end this process a minute after that has ended.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

# The collector would search all modules again and again while tests are collected, and after that whenever it runs.
gc.disable()

# Machines that run tests are shared: the time to draw or run one example says nothing about the code.
# pytest-timeout bounds a whole test. Each run draws other examples, so a test needs few of them.
hypothesis.settings.register_profile(
    "dagrl", deadline=None, max_examples=20, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("dagrl")


def shared_by(nodeid: str) -> str | None:
    file = nodeid.removeprefix("tests/integration/test_")
    return next((name for name, starts in SHARED.items() if file != nodeid and file.startswith(starts)), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share something, which take longest, begin first, so that no process waits for them at the end."""
    items.sort(key=lambda item: shared_by(item.nodeid) is None)


def pytest_collection_finish() -> None:
    """From here on the garbage collector runs."""
    gc.set_threshold(20_000, 10, 10)
    gc.enable()
    # pytest attaches its handlers to each logger that does not propagate, six times a test. torch has 80 of them.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist: a process that is free takes the next file, or all files that share something."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return shared_by(nodeid) or nodeid.partition("::")[0]

    return ByFile(config, log)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Keeps the garbage collector from searching what earlier files imported again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Commands set the level of their process, which here goes on with other tests."""
    ours = logging.getLogger("dagrl")
    level, propagate, handlers = ours.level, ours.propagate, list(ours.handlers)
    yield
    if ours.level != level:  # setting it clears the caches of all loggers
        ours.setLevel(level)
    ours.propagate, ours.handlers[:] = propagate, handlers


@pytest.fixture(autouse=True)
def _own_ray() -> Iterator[None]:
    """Fails a test that ends the Ray of others, or leaves its own running. Shared ones start before this."""

    def address() -> str | None:
        ray = sys.modules.get("ray")
        return ray.get_runtime_context().gcs_address if ray and ray.is_initialized() else None

    before = address()
    yield
    assert address() == before, "left: the address of this process's Ray after the test; expected: that before it"


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    with ray_cluster(ClusterConfig(num_cpus=4), {"OMP_NUM_THREADS": "1"}):
        yield


@pytest.fixture(scope="module")
def one_cluster(cluster: None) -> Iterator[None]:
    """Makes the runs of a file in this process join the session's cluster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dagrl.run.fleet.ray_cluster", lambda *args, **options: nullcontext())
        patch.setattr("dagrl.run.fleet.require_no_ray", nullcontext)
        yield
