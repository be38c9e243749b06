"""The audit of lock files finds what is not pinned or known to be vulnerable, and nothing in ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

AUDIT = Path(__file__).parents[2] / "requirements" / "audit.py"


def audit(*locks: Path) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, AUDIT, *locks], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr.splitlines()


def test_our_locks_are_clean() -> None:
    assert audit() == (0, [])


def test_each_problem_is_named_with_its_line(tmp_path: Path) -> None:
    lock = tmp_path / "bad.lock"
    lock.write_text(
        "# versions\nnumpy==2.3.5\nNumPy==2.3.6\nJinja2==3.1.5  # old\nray>=2.60\ngit+https://x/y.git\ntorch==2.13.0+cpu\n"
    )
    code, found = audit(lock)
    assert code == 1
    assert found == [
        "bad.lock, line 3: numpy is there twice",
        "bad.lock, line 4: jinja2 3.1.5 has CVE-2025-27516: sandbox escape; use 3.1.6 or later",
        "bad.lock, line 5: 'ray>=2.60' is not pinned; expected: name==version",
        "bad.lock, line 6: 'git+https://x/y.git' is not pinned; expected: name==version",
    ]
