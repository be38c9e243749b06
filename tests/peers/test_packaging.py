"""dagrl next to verl: installing it changes no package that verl has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_installing_dagrl_changes_nothing_of_verls() -> None:
    install = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-build-isolation", "--report", "-"]
    done = subprocess.run([*install, str(ROOT)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    installed = [item["metadata"]["name"] for item in json.loads(done.stdout)["install"]]
    assert installed == ["dagrl"]
