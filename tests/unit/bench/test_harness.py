"""The loop of all benchmarks: rounds in turn, paired ratios, a deadline, sides that fail, and rows of earlier runs."""

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dagrl.bench import harness, report
from dagrl.bench.harness import Contest, Deadline, Turn
from dagrl.bench.report import BenchReport
from dagrl.errors import ConfigError, RunError


def options(tmp_path: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    harness.add_arguments(parser)
    return parser.parse_args(["--json", str(tmp_path / "rows.json"), *words])


def contest(sides: dict[str, Any], warmup: int = 0) -> Contest:
    return Contest("sleep", {"short": {"tokens": 8}}, lambda: nullcontext(sides), warmup)


def side(name: str, order: list[str], *seconds: float) -> Any:
    """Returns a side whose turns take these seconds; the last one repeats."""
    left = list(seconds)

    def take() -> dict[str, Turn]:
        order.append(name)
        return {"short": Turn([left.pop(0) if len(left) > 1 else left[0]] * 2, {"kl": 0.5, "losses": [1.0, 2.0]})}

    return take


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((path / "rows.json").read_text())["rows"]
    return rows


def test_ratios_are_of_the_same_round_and_sides_alternate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The machine is half as fast in the second round: both sides are, so their ratio is not affected."""
    order: list[str] = []
    sides = {"ours": side("ours", order, 9.0, 1.0, 2.0, 1.0), "theirs": side("theirs", order, 9.0, 3.0, 6.0, 4.0)}
    harness.run(options(tmp_path), [contest(sides, warmup=1)])
    assert order == ["theirs", "ours", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    ours, theirs = rows_of(tmp_path)
    assert (ours["median_s"], ours["n"], ours["rounds"], ours["tokens"]) == (1.0, 6, 3, 8) and "ratio" not in ours
    assert (theirs["ratio"], theirs["ratio_low"], theirs["ratio_high"]) == (3.0, 3.0, 4.0)
    assert theirs["rounds_s"] == [3.0, 6.0, 4.0] and theirs["kl"] == 0.5 and theirs["losses"] == [1.0, 2.0]
    assert "theirs" in capsys.readouterr().out


def test_a_side_that_fails_leaves_the_others(tmp_path: Path) -> None:
    order: list[str] = []
    broken = Mock(side_effect=RunError("out of memory"))
    with pytest.raises(RunError, match="failed: sleep, broken"):
        harness.run(options(tmp_path), [contest({"ours": side("ours", order, 1.0), "broken": broken})])
    assert broken.call_count == 1 and order.count("ours") == 3
    report = json.loads((tmp_path / "rows.json").read_text())
    assert report["failed"] == {"sleep, broken": "out of memory"} and [row["side"] for row in report["rows"]] == ["ours"]


def test_the_deadline_leaves_out_what_would_not_end_in_time() -> None:
    now = 0.0
    deadline = Deadline(10.0, lambda: now)
    assert deadline.allows("first")
    now = 4.0
    assert deadline.allows("second") and deadline.left() == 6.0
    now = 7.0  # the longest took 4 s
    assert not deadline.allows("third")
    assert deadline.left_out == {"third": harness.TIME_IS_UP}


def test_later_rounds_are_left_out(tmp_path: Path) -> None:
    def slow() -> dict[str, Turn]:
        time.sleep(0.1)
        return {"short": Turn([0.1])}

    harness.run(options(tmp_path, "--deadline", "0.15", "--rounds", "9"), [contest({"ours": slow})])
    report = json.loads((tmp_path / "rows.json").read_text())
    assert report["rows"][0]["rounds"] in (1, 2) and len(report["left_out"]) == 1


def test_rounds_are_added_to_those_of_an_earlier_run(tmp_path: Path) -> None:
    def measure(first: float, *words: str, tokens: int = 8) -> None:
        one = Contest("sleep", {"short": {"tokens": tokens}}, lambda: nullcontext(sides))
        sides = {"ours": side("ours", [], 1.0), "theirs": side("theirs", [], first)}
        harness.run(options(tmp_path, "--rounds", "2", *words), [one])

    measure(2.0)
    earlier = tmp_path / "earlier.json"
    (tmp_path / "rows.json").rename(earlier)
    measure(4.0, "--more", str(earlier))
    row = rows_of(tmp_path)[1]
    assert row["rounds_s"] == [2.0, 2.0, 4.0, 4.0] and (row["ratio"], row["median_s"], len(row["commits"])) == (3.0, 3.0, 2)
    report = json.loads(earlier.read_text())
    earlier.write_text(json.dumps({**report, "hardware": "another host"}))
    with pytest.raises(ConfigError, match="hardware: found another host, expected"):
        measure(4.0, "--more", str(earlier))
    earlier.write_text("{}")
    with pytest.raises(ConfigError, match="expected rows of this benchmark"):
        measure(4.0, "--more", str(earlier))
    earlier.write_text(json.dumps(report))
    with pytest.raises(RunError, match="failed: sleep"):
        measure(4.0, "--more", str(earlier), tokens=9)


def test_a_written_report_reads_back(tmp_path: Path) -> None:
    left_out = {"chain of 8 workers": "the time is up"}
    written = BenchReport([{"variant": "a", "p50_us": 1.5}], "dagrl bench overhead", left_out=left_out)
    written.write(tmp_path / "report.json")
    assert BenchReport.read(tmp_path / "report.json") == written


@pytest.mark.parametrize(("seconds", "text"), [(4.5, "4.5 s"), (0.0123, "12.3 ms"), (44e-6, "44 us"), (None, "")])
def test_times_are_shown_in_readable_units(seconds: float | None, text: str) -> None:
    assert report.shown(seconds) == text


def test_the_recorded_command_is_runnable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/dagrl", "bench", "overhead", "--shapes", "multiple args,chain"])
    assert report.command_line() == "dagrl bench overhead --shapes 'multiple args,chain'"
