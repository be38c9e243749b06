"""The example of a phase in a loop of one's own runs as its first line says."""

from __future__ import annotations

import subprocess
import sys

from tests.integration.main_job import ROOT

EXAMPLE = ROOT / "examples" / "embed_phase.py"


def test_the_embedding_example_finds_the_slope() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "slope 3.000"


def test_the_embedding_example_is_short() -> None:
    """What is its own: neither blank nor an import."""
    lines = [line for line in EXAMPLE.read_text().splitlines()[1:] if line.strip()]
    assert sum(not line.startswith(("import ", "from ")) for line in lines) <= 30
