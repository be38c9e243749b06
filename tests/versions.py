"""Runs the tests that need no Megatron on other versions of Python, Ray, torch and vLLM: `make test-versions`.

    python tests/versions.py ray==2.59.0 python3.13 python3.12,torch==2.14.1

Each argument is one combination: a Python, packages, or both. Everything else is the newest release that pyproject.toml
allows; if only Ray differs, it is what this Python has. Each combination is installed into an environment of its own. Prints
its versions, and whether the tests pass. The results are in docs/runtime.md.

PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu takes torch's builds without CUDA, which are smaller.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = [
    *(f"tests/unit/{room}" for room in ("runtime", "channels", "config", "data", "refit", "rl")),
    *(f"tests/integration/{room}" for room in ("runtime", "rl")),
    *(
        f"tests/integration/test_{name}.py"
        for name in ("replay", "codec", "foreign_actors", "embed_nemo_rl", "channel_gloo")
    ),
    "tests/faults/test_replay_faults.py",
]
VLLM_TESTS = [f"tests/integration/test_vllm_{name}.py" for name in ("generate", "refit", "transfer")]
TOOLS = ("pytest", "pytest-timeout", "hypothesis")
FOUND = """
import importlib.metadata, platform
packages = [f"{one} {importlib.metadata.version(one)}" for one in ("ray", "torch", "numpy", "transformers")]
print("Python", platform.python_version(), *packages)
"""


def with_ray(directory: Path, ray: str) -> Path:
    """Installs one version of Ray over everything else that this Python has; returns the environment's Python."""
    venv.create(directory, symlinks=True)
    packages = directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    below = sysconfig.get_path("purelib")
    (packages / "below.pth").write_text(f"import sys; sys.path.append({below!r})\n")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), ray]
    subprocess.run(pip, check=True, timeout=600)
    return directory / "bin" / "python"


def with_packages(directory: Path, interpreter: str, packages: list[str]) -> Path:
    """Installs what dagrl and its tests need, with these packages among it; returns the environment's Python."""
    subprocess.run([interpreter, "-m", "venv", str(directory)], check=True, timeout=120)
    python = directory / "bin" / "python"
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *needed, *TOOLS, *packages]
    subprocess.run(pip, check=True, timeout=3600)
    return python


def run_tests(combination: str) -> bool:
    """Runs the tests on one combination."""
    words = combination.split(",")
    packages = [word for word in words if not word.startswith("python")]
    interpreter = next((word for word in words if word.startswith("python")), "")
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "environment"
        if not interpreter and len(packages) == 1 and packages[0].startswith("ray=="):
            python = with_ray(directory, packages[0])
        else:
            python = with_packages(directory, interpreter or sys.executable, packages)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([python, "-c", FOUND], cwd=ROOT, env=environment, check=True, timeout=120)
        chosen = TESTS + (VLLM_TESTS if any(package.startswith("vllm") for package in packages) else [])
        tests = [python, "-m", "pytest", "--verbose", "-p", "no:xdist", *chosen]
        code = subprocess.run(tests, cwd=ROOT, env=environment, timeout=3600).returncode
        print(f"{combination}: {'passed' if code == 0 else f'FAILED, exit code {code}'}", flush=True)
    return code == 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("name at least one combination, such as ray==2.59.0 or python3.13,torch==2.14.1")
    sys.exit(not all([run_tests(combination) for combination in sys.argv[1:]]))
