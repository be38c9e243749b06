"""Reports of benchmarks: their commit, old files without one, and the cost per shard."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from dagrl.bench import report
from dagrl.bench.report import BenchReport, commit

ROOT = Path(__file__).parents[3]


def test_a_report_names_the_commit_of_the_checkout() -> None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        pytest.skip("not a checkout")
    found = commit().removesuffix("+changes")
    assert len(found) >= 12 and done.stdout.startswith(found)


@pytest.mark.parametrize(
    ("status", "expected"), [("", "abc"), (" M dagrl/runtime/replay.py", "abc+changes")], ids=["clean", "changed"]
)
def test_uncommitted_changes_are_marked(monkeypatch: pytest.MonkeyPatch, status: str, expected: str) -> None:
    monkeypatch.setattr(report, "_git", lambda *words: {"rev-parse": "abc", "status": status}[words[0]])
    assert commit.__wrapped__() == expected
    monkeypatch.setattr(report, "_git", lambda *words: "")
    assert commit.__wrapped__() == "", "outside a checkout"


def test_shard_cost_is_relative_to_the_fused_graph(capsys: pytest.CaptureFixture[str]) -> None:
    case = {"shape": "reduce", "workers": 8, "shards": 4, "hosts": 1, "payload_bytes": 100, "result_bytes": 100, "arity": 8}
    rows = [
        {**case, "variant": variant, "p50_us": us} for variant, us in (("dagrl_compiled", 190.0), ("dagrl_fused", 100.0))
    ]
    rows.append({**case, "variant": "dagrl_compiled", "shards": 1, "p50_us": 90.0})
    report.print_shard_costs(rows)
    assert capsys.readouterr().out.splitlines() == [
        "reduce, 8 workers, 100 B: 4 graphs cost +90 us over one fused graph, +30.0 us per further shard"
    ]


def test_a_written_report_reads_back(tmp_path: Path) -> None:
    written = BenchReport(
        [{"variant": "a", "p50_us": 1.5}], "dagrl bench overhead", left_out={"chain of 8 workers": "the time is up"}
    )
    written.write(tmp_path / "report.json")
    assert BenchReport.read(tmp_path / "report.json") == written
    old = {"hardware": "2-core host", "versions": {"python": "3.11"}, "command": "dagrl bench overhead", "rows": []}
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert BenchReport.read(tmp_path / "old.json").commit == ""
