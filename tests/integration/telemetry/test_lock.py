"""The lock of a run's directory between processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dagrl.errors import ConfigError
from dagrl.telemetry.record import RunPaths, lock_run
from tests.unit.telemetry.test_record import config

HOLD = """
import subprocess, sys
from pathlib import Path
from dagrl.telemetry.record import RunPaths, lock_run
with lock_run(RunPaths(Path(sys.argv[1]), Path(sys.argv[1]) / "checkpoints")):
    print(subprocess.Popen(["sleep", "60"], close_fds=False).pid, flush=True)
    sys.stdin.read()
"""


def test_the_lock_of_a_killed_run_is_free_although_its_child_lives(tmp_path: Path) -> None:
    paths = RunPaths.of(config(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, paths.directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        child = int(run.stdout.readline())
        with (
            pytest.raises(ConfigError, match=rf"tiny is in use by pid {run.pid} on .* choose another name"),
            lock_run(paths),
        ):
            pass
        with pytest.raises(ConfigError, match=f"tiny is in use by pid {run.pid}"), lock_run(paths, existing=True):
            pass
        run.kill()
    try:
        for _ in range(2):  # twice, like a restart in the same process
            with lock_run(paths):
                os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
