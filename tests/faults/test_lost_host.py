"""A host goes away with its engine: nothing waits for a new one there, and the run restarts.

The hosts are raylets of this machine with a GPU each that only Ray believes in.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from dagrl.config.file import load_config
from dagrl.errors import PhaseError
from dagrl.run.engines import EngineReplacement
from dagrl.run.fleet import Fleet
from dagrl.runtime.actors import Resources
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Shard, join, phase
from dagrl.runtime.worker_group import WorkerGroup
from tests.faults.test_revive import ByShard, Resettable
from tests.integration.processes import ends_within
from tests.integration.schedules import compiled, group_of

ROOT = Path(__file__).parents[2]
START_S = 60.0


class Engine(ByShard):
    """May be put on a GPU by Ray."""


@phase
def generate(generation: Shard, how):
    return generation.map("misbehave", how)


@phase
def refit(train: Shard, generation: Shard, version):
    return join(train.map("rank", version), generation.map("rank", version))


@pytest.fixture
def train(cluster: None) -> Iterator[WorkerGroup]:
    """On the driver's host, as there is no other yet."""
    with group_of(Resettable) as group:
        yield group


@pytest.fixture
def hosts(train: WorkerGroup) -> Iterator[None]:
    address = ray.get_runtime_context().gcs_address
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", f"--address={address}"]
    command += ["--num-gpus=1", "--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for count in (1, 2):  # one after the other: they choose ports
            started.append(subprocess.Popen(command, **quiet))
            assert ends_within(START_S, lambda count=count: ray.cluster_resources().get("GPU") != count)
        yield
    finally:
        for host in started:  # by SIGTERM, of which Ray learns at once: it would start actors of later tests on the others
            os.killpg(host.pid, signal.SIGTERM)
            host.wait()
        assert ends_within(START_S, lambda: sum(node["Alive"] for node in ray.nodes()) > 1)


@pytest.mark.slow
@pytest.mark.usefixtures("hosts", "one_cluster")
def test_an_engine_of_a_lost_host_is_not_replaced(train: WorkerGroup) -> None:
    config = load_config(ROOT / "examples" / "grpo_quickstart.yaml", ["cluster.gpus_per_worker=1"])
    engines = WorkerGroup.create("generation", Engine, ParallelLayout(dp=2), None, resources=Resources(num_gpus=1.0))
    try:
        with compiled([train, engines], {generate: {"rank": -1}, refit: 0}) as scheduler:
            replays: Any = SimpleNamespace(scheduler=scheduler, devices=3, phases={"generate": generate, "refit": refit})
            fleet = Fleet(restarts=1)
            replacement = EngineReplacement(config, fleet, engines, replays, lambda: None)
            first = engines.locations[0]
            kill_host(first.pid)
            with pytest.raises(PhaseError, match="died") as lost:
                scheduler.replay(generate, {"rank": -1}).result()
            assert ends_within(START_S, lambda: first.node in {node["NodeID"] for node in ray.nodes() if node["Alive"]})
            assert replacement.replace(lost.value) is None
            assert fleet.restarts == 1, "the restart counts, not the replacement"
    finally:
        engines.shutdown(2.0)


def kill_host(worker: int) -> None:
    """Kills the raylet that started a worker, which ends with it, as all of a host's processes do."""
    status = Path(f"/proc/{worker}/status").read_text().splitlines()
    os.kill(int(next(line.split()[1] for line in status if line.startswith("PPid:"))), signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
