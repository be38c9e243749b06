"""Phases over two hosts give the same results under both executors, and name what fails there."""

import subprocess
import sys

import pytest

from tests.integration.main_job import ROOT


@pytest.mark.slow
def test_phases_over_two_hosts() -> None:
    command = [sys.executable, "-m", "tests.integration.two_hosts"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["lost True () True True", "died [(5, 'died')]", "164 results are equal"]
