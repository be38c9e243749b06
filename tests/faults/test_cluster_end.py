"""The end of a cluster whose raylet does not answer, or whose driver is killed; and none of a Ray of the caller."""

import os
import signal
import subprocess
import sys
import time

import pytest

from dagrl.config import ClusterConfig
from dagrl.errors import UserError
from dagrl.run.cluster import ray_cluster
from dagrl.run.fleet import Fleet
from tests.integration.processes import alive, ends_within

STOPPED = """
import logging, os, ray, signal, threading, time
from dagrl.run.cluster import ray_cluster
from dagrl.config import ClusterConfig
from dagrl.run.local_cluster import cluster_processes
from dagrl.machine import descendants_of

logging.basicConfig(level="WARNING")
def litter():
    while references:
        garbage = [references.pop()]
        garbage.append([garbage, *([] for _ in range(2000))])
        time.sleep(0.001)

with ray_cluster(ClusterConfig(num_cpus=1), teardown_s=3.0):
    processes = cluster_processes()
    assert os.getpgid(0) not in {os.getpgid(process.pid) for process in processes}, "Ctrl-C would end Ray before the driver"
    raylet = next(process.pid for process in processes if "raylet" in process.args[0])
    print(*(process.pid for process in processes), *descendants_of(raylet), flush=True)
    references = [ray.put(number) for number in range(10000)]
    threading.Thread(target=litter, daemon=True).start()
    os.kill(raylet, signal.SIGSTOP)
"""


@pytest.mark.slow
def test_a_cluster_with_a_stopped_raylet_is_killed_with_a_warning() -> None:
    started = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=120, check=True)
    pids = [int(word) for word in ended.stdout.split()]
    assert len(pids) > 3 and not killed(pids)
    assert "Ray did not end within timeouts.teardown_s = 3 s: its processes" in ended.stderr
    assert time.monotonic() - started < 60


KILLED = """
import os, ray, signal, sys
from dagrl.run.cluster import ray_cluster
from dagrl.run.local_cluster import cluster_processes
from dagrl.config import ClusterConfig
from dagrl.machine import descendants_of

during_start, ray_init = sys.argv[1] == "start", ray.init

class Worker:
    def pid(self):
        return os.getpid()

def init(**arguments):
    ray_init(**arguments)
    worker = ray.remote(num_cpus=0)(Worker).remote()
    assert ray.get(worker.pid.remote()) in descendants_of(os.getpid())
    assert len({os.getpgid(pid) for pid in descendants_of(os.getpid())}) == 1, "a worker that hangs would not end"
    print(*descendants_of(os.getpid()), flush=True)
    if during_start:
        os.kill(next(process.pid for process in cluster_processes() if "raylet" in process.args[0]), signal.SIGKILL)
        raise Exception("no node")

ray.init = init
with ray_cluster(ClusterConfig(num_cpus=1)):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("moment", "code"), [("run", -signal.SIGKILL), pytest.param("start", 1, marks=pytest.mark.slow)])
def test_nothing_of_a_cluster_outlives_its_driver_or_a_failed_start(moment: str, code: int) -> None:
    """Ray alone leaves the agents of a raylet that was killed for more than a minute."""
    command = [sys.executable, "-c", KILLED, moment]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, start_new_session=True, check=False)
    pids = [int(word) for word in ended.stdout.partition("\n")[0].split()]
    assert ended.returncode == code and len(pids) > 5, ended.stderr
    assert ends_within(20.0, lambda: any(map(alive, pids))) or not killed(pids)


def test_a_ray_that_the_caller_started_runs_on(cluster: None) -> None:
    """As `_own_ray` of tests/conftest.py checks."""
    for begin in (Fleet, lambda: ray_cluster(ClusterConfig(address="auto"))):
        with pytest.raises(UserError, match=r"Ray already runs in this process; .* Call ray\.shutdown\(\) first"), begin():
            pass


def killed(pids: list[int]) -> list[int]:
    """Kills those that still run, and returns them."""
    left = list(filter(alive, pids))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left
