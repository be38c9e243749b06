"""Reports of measurements: the commit that made them, and files of before reports had one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench import report
from bench.report import Report, commit

ROOT = Path(__file__).parents[2]


def test_a_report_names_the_commit_of_the_checkout() -> None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        pytest.skip("not a checkout")
    found = commit().removesuffix("+changes")
    assert len(found) >= 12 and done.stdout.startswith(found)


@pytest.mark.parametrize(
    ("status", "expected"), [("", "abc"), (" M dagrl/replay.py", "abc+changes")], ids=["clean", "changed"]
)
def test_changes_are_told(monkeypatch: pytest.MonkeyPatch, status: str, expected: str) -> None:
    monkeypatch.setattr(report, "_git", lambda *words: {"rev-parse": "abc", "status": status}[words[0]])
    assert commit.__wrapped__() == expected
    monkeypatch.setattr(report, "_git", lambda *words: "")
    assert commit.__wrapped__() == "", "no checkout"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = Report(
        [{"variant": "a", "p50_us": 1.5}], "dagrl bench overhead", left_out={"chain of 8 workers": "the time is up"}
    )
    written.write(tmp_path / "report.json")
    assert Report.read(tmp_path / "report.json") == written
    old = {"hardware": "2-core host", "versions": {"python": "3.11"}, "command": "dagrl bench overhead", "rows": []}
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert Report.read(tmp_path / "old.json").commit == ""
