"""Runs the executor tests on other versions of Ray.

    python tests/ray_versions.py 2.59.0 2.55.1

Each version is installed alone into an environment of its own, over everything else that this Python has. Prints for each
version which engine `executor_cfg.engine: dagrl` becomes, and whether the tests pass. docs/runtime.md lists the results.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/integration/test_replay.py", "tests/faults/test_replay_faults.py")
ENGINE = (
    "from dagrl.runtime.executors.ray_dag import unknown_parts; found = unknown_parts(); "
    "print(f'dagrl (all private parts are known)' if not found else f'ray (unknown: {found})')"
)


def make_environment(directory: Path, version: str) -> Path:
    """Installs one version of Ray; returns the environment's Python."""
    venv.create(directory, symlinks=True)
    packages = directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    below = sysconfig.get_path("purelib")
    (packages / "below.pth").write_text(f"import sys; sys.path.append({below!r})\n")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), f"ray=={version}"]
    subprocess.run(pip, check=True, timeout=600)
    return directory / "bin" / "python"


def run_tests(version: str) -> bool:
    """Runs the tests on one version of Ray."""
    with tempfile.TemporaryDirectory() as directory:
        python = make_environment(Path(directory), version)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([python, "-c", ENGINE], cwd=ROOT, env=environment, check=True, timeout=120)
        tests = [python, "-m", "pytest", "--quiet", "-p", "no:xdist", *TESTS]
        passed = subprocess.run(tests, cwd=ROOT, env=environment, timeout=1800).returncode == 0
        print(f"ray {version}: {'passed' if passed else 'FAILED'}", flush=True)
    return passed


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("name at least one version of Ray, such as 2.59.0")
    sys.exit(not all([run_tests(version) for version in sys.argv[1:]]))
