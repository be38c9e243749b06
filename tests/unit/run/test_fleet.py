"""A fleet notices that a process of Ray has ended, and keeps nothing of such a cluster for a restart."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dagrl.errors import ClusterError, WorkerError
from dagrl.run.fleet import Fleet


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
