"""The audit of lock files finds what is not pinned or known to be vulnerable. `make lint` runs it over ours."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

AUDIT = Path(__file__).parents[2] / "requirements" / "audit.py"


def test_each_problem_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("audit", AUDIT)
    assert spec is not None and spec.loader is not None
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    lock = tmp_path / "bad.lock"
    lock.write_text(
        "# versions\nnumpy==2.3.5\nNumPy==2.3.6\nJinja2==3.1.5  # old\nray>=2.60\ngit+https://x/y.git\ntorch==2.13.0+cpu\n"
    )
    assert audit.main([str(lock)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "bad.lock, line 3: numpy is there twice",
        "bad.lock, line 4: jinja2 3.1.5 has CVE-2025-27516: sandbox escape; use 3.1.6 or later",
        "bad.lock, line 5: 'ray>=2.60' is not pinned; expected: name==version",
        "bad.lock, line 6: 'git+https://x/y.git' is not pinned; expected: name==version",
    ]
