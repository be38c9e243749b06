"""Endurance: thousands of replays and recompilations, at constant time and memory. Slow; run with `-m slow`.

`DAGRL_ENDURANCE=0.02` runs that fraction. `bench/results/endurance-worn.json` has a full run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from dagrl.bench.endurance import cycles, replays, two_workers
from dagrl.runtime.worker_group import WorkerGroup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SHARE = float(os.environ.get("DAGRL_ENDURANCE", "1"))
SETTLING_MB = 24.0
"""Growth within the noise of allocators; a leak of 1 KiB per replay would be four times as much."""

FEW = 8
"""Descriptors and threads that Ray may open once."""


@pytest.fixture(scope="module")
def group(cluster: None) -> Iterator[WorkerGroup]:
    group = two_workers()
    yield group
    group.kill([0, 1])


def test_thousands_of_replays_take_constant_time_and_memory(group: WorkerGroup) -> None:
    found = replays(group, int(100_000 * SHARE))
    assert found["worn"] <= 1.2  # next to a fresh graph, whose turns differ by 6 % on a shared host
    assert found["last_calls"] <= 1.05 * found["first_calls"]
    for before, after in (found["descriptors"], found["threads"]):
        assert after - before < FEW
    assert found["resident_mb"][-1] - found["resident_mb"][0] < SETTLING_MB


def test_recompiling_with_large_edges_leaves_nothing_behind(group: WorkerGroup) -> None:
    found = cycles(group, max(3, int(100 * SHARE)))
    assert found["longest_teardown_s"] < 8.0
    assert found["left_semaphores"] <= 0
    assert found["left_shared_mb"] < SETTLING_MB
    assert found["resident_mb"][-1] - found["resident_mb"][0] < SETTLING_MB
