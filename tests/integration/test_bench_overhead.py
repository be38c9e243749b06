"""`bench overhead` in short: steps, first steps, and many replays with the processor time of waiting; and refits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dagrl.bench import bench_refit
from dagrl.bench import replays as module
from dagrl.bench.replays import first_steps, waiting
from dagrl.bench.variants import Actors

WORKERS = 2


def test_first_steps_many_replays_and_waiting(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 1.0)
    actors = Actors.start(WORKERS, (), ("dagrl_compiled",))
    try:
        first = first_steps(WORKERS, actors, 1)
        found = waiting(WORKERS, actors, replays=200)
    finally:
        _end(actors)
    assert first["n"] == 1 and first["later_us"] > 0
    assert found["n"] == 200 and found["cpu_us"] > 0 and 0 < found["p50_us"] <= found["p99_us"] <= found["p999_us"]
    assert found["ratio"] == pytest.approx(found["p99_us"] / found["p50_us"], abs=0.01)
    assert 0 <= found["waiting_cpu_s"] < WORKERS + 1  # a waiting process burns at most a core


def _end(actors: Any) -> None:
    import ray

    for actor in actors.of["dagrl_compiled"]:
        ray.kill(actor)


def test_refits_run_under_pytest_benchmark() -> None:
    options = ["--benchmark-disable", "-q", "-k", "ipc-checksum", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", str(Path(bench_refit.__file__)), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
