"""Reports of benchmarks: their commit and command, tables and plots."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from dagrl.bench import report
from dagrl.bench.report import Row, check_plot, command_line, commit, plot, print_table
from dagrl.errors import ConfigError

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


def test_a_report_has_what_is_needed_to_repeat_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["dagrl", "bench", "overhead"])
    path, rows = tmp_path / "new" / "report.json", [{"variant": "a", "p50_us": 1.5}, {"variant": "b", "p50_us": 2.5}]
    report.write_result(path, {"left_out": {"chain": "the time is up"}}, rows, "cases")
    found = json.loads(path.read_text())
    assert (found["cases"], found["left_out"], found["command"]) == (
        rows,
        {"chain": "the time is up"},
        "dagrl bench overhead",
    )
    assert {"hardware", "versions", "commit"} <= found.keys()
    assert ' "cases": [\n  {"variant": "a", "p50_us": 1.5},\n  {"variant": "b"' in path.read_text(), "a line for each row"
    report.write_result(path, {"left_out": {}}, [])
    assert json.loads(path.read_text())["rows"] == []


def row(us: float, workers: int, **more: str | int) -> Row:
    case = {"variant": "dagrl_compiled", "shape": "scatter-gather", "workers": workers, "hosts": 1}
    return case | {"payload_bytes": 100, "result_bytes": 100, "p50_us": us, "p99_us": 2 * us, "n": 9} | more


@pytest.mark.parametrize(("count", "cell"), [(99, "10 / 20 (n 99)"), (100, "10 / 20")])
def test_a_percentile_of_few_samples_shows_their_number(count: int, cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_table([row(10.0, 1) | {"n": count}])
    assert cell + " " in capsys.readouterr().out


def test_any_shape_on_any_number_of_hosts_can_be_plotted(tmp_path: Path) -> None:
    """A report of two hosts, or of chains alone, can be plotted."""
    rows = [row(10.0 * n, n, shape="chain", hosts=2) for n in (2, 4)]
    plot(rows, tmp_path / "chain.png")
    plot([row(9.0, 2, shape="reduce", arity=arity) for arity in (2, 8)], tmp_path / "reduce.svg")
    assert (tmp_path / "chain.png").stat().st_size > 1000
    assert "arity 8" in (tmp_path / "reduce.svg").read_text()


def test_an_unknown_plot_type_is_rejected_before_measuring(tmp_path: Path) -> None:
    check_plot(tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"--plot .*a\.xyz: cannot draw file type '\.xyz'; use one of .*png"):
        check_plot(tmp_path / "a.xyz")


def test_the_recorded_command_is_runnable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/dagrl", "bench", "overhead", "--shapes", "multiple args,chain"])
    assert command_line() == "dagrl bench overhead --shapes 'multiple args,chain'"
