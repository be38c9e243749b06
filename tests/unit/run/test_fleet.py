"""A fleet notices that a process of Ray has ended, and keeps nothing of such a cluster for a restart."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dagrl.config.file import load_config
from dagrl.errors import ClusterError, StopRequestedError, WorkerError
from dagrl.run.fleet import Fleet
from dagrl.run.stop import StopSignal

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo_quickstart.yaml"


def test_a_cluster_without_its_raylet_is_given_up(tmp_path: Path) -> None:
    sleep = shutil.copy(shutil.which("sleep") or "", tmp_path / "raylet")
    fleet = Fleet(restarts=1)
    with subprocess.Popen([str(sleep), "60"]) as raylet:
        fleet._joined, fleet._processes = True, [raylet]
        fleet.check()
        fleet.leave(WorkerError(()))
        assert fleet._joined, "a restart uses the cluster"
        raylet.kill()
        raylet.wait()
        with pytest.raises(ClusterError, match=rf"raylet \(pid {raylet.pid}\) ended under the run"):
            fleet.check()
        fleet.leave(WorkerError(()))
    assert not fleet._joined, "a restart starts another one"


def test_a_start_is_given_up_on_request_and_without_its_raylet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends the driver 60 s after its GCS, without a message of ours."""
    monkeypatch.setattr("dagrl.run.fleet.start_groups", lambda config, roles, stack, check: check())
    fleet, stop, config = Fleet(), StopSignal(), load_config(EXAMPLE)
    sleep = shutil.copy(shutil.which("sleep") or "", tmp_path / "gcs_server")
    with subprocess.Popen([str(sleep), "60"]) as server:
        fleet._processes = [server]
        fleet.groups(config, {"train"}, stop)
        stop.requested = True
        with pytest.raises(StopRequestedError):
            fleet.groups(config, {"train"}, stop)
        stop.requested = False
        server.kill()
        server.wait()
        with pytest.raises(ClusterError, match=r"gcs_server .* ended under the run"):
            fleet.groups(config, {"train"}, stop)
