"""Endurance: replays and recompilations by the thousand, at flat time and memory. Slow; run with `-m slow`.

`DAGRL_ENDURANCE=0.02` runs that share of it. The whole of it is in `bench/results/endurance-worn.json`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bench.endurance import cycles, replays, two_workers
from dagrl.worker_group import WorkerGroup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SHARE = float(os.environ.get("DAGRL_ENDURANCE", "1"))
SETTLING_MB = 24.0
"""Growth that allocators may show without a leak; a leak of 1 KiB a replay is four times as much."""


@pytest.fixture(scope="module")
def group(cluster: None) -> Iterator[WorkerGroup]:
    group = two_workers()
    yield group
    group.kill([0, 1])


def test_replays_by_the_thousand_take_the_same_time_and_memory(group: WorkerGroup) -> None:
    found = replays(group, int(100_000 * SHARE))
    assert found.worn <= 1.05  # as fast as a fresh graph beside it
    assert found.resident_mb[-1] - found.resident_mb[0] < SETTLING_MB


def test_compiling_and_tearing_down_with_large_edges_leaves_nothing_behind(group: WorkerGroup) -> None:
    found = cycles(group, max(3, int(100 * SHARE)))
    assert found.longest_teardown_s < 8.0
    assert found.left_semaphores <= 0
    assert found.left_shared_mb < SETTLING_MB
    assert found.resident_mb[-1] - found.resident_mb[0] < SETTLING_MB
