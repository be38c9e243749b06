"""Reports of benchmarks: files, tables and plots."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.bench import report
from dagrl.bench.report import BenchReport, commit


@pytest.mark.parametrize(
    ("status", "expected"), [("", "abc"), (" M dagrl/runtime/replay.py", "abc+changes")], ids=["clean", "changed"]
)
def test_uncommitted_changes_are_marked(monkeypatch: pytest.MonkeyPatch, status: str, expected: str) -> None:
    monkeypatch.setattr(report, "_git", lambda *words: {"rev-parse": "abc", "status": status}[words[0]])
    assert commit.__wrapped__() == expected
    monkeypatch.setattr(report, "_git", lambda *words: "")
    assert commit.__wrapped__() == "", "outside a checkout"


def test_a_written_report_reads_back(tmp_path: Path) -> None:
    written = BenchReport(
        [{"variant": "a", "p50_us": 1.5}], "dagrl bench overhead", left_out={"chain of 8 workers": "the time is up"}
    )
    written.write(tmp_path / "report.json")
    assert BenchReport.read(tmp_path / "report.json") == written


@pytest.mark.parametrize(("seconds", "text"), [(4.5, "4.5 s"), (0.0123, "12.3 ms"), (44e-6, "44 us"), (None, "")])
def test_times_are_shown_in_readable_units(seconds: float | None, text: str) -> None:
    assert report.shown(seconds) == text


def test_the_recorded_command_is_runnable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/dagrl", "bench", "overhead", "--shapes", "multiple args,chain"])
    assert report.command_line() == "dagrl bench overhead --shapes 'multiple args,chain'"
