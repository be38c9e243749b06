"""The loop of all benchmarks: rounds in turn, paired ratios, a deadline, sides that fail, earlier rows; and `run_all`."""

import argparse
import importlib
import json
import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dagrl.bench import harness, report, step, train
from dagrl.bench.gpu import run_all
from dagrl.bench.gpu.jobs import Job, jobs
from dagrl.bench.harness import ROOT, Contest, Deadline, Turn
from dagrl.bench.report import BenchReport
from dagrl.config import Config
from dagrl.config.checks import check_settings
from dagrl.config.file import load_config
from dagrl.config.plan import RunPlan
from dagrl.errors import ConfigError, RunError
from dagrl.run.memory import Decoder, train_memory
from dagrl.run.preflight import check_machine, preflight, trace_phases, worker_classes
from dagrl.workers.megatron.architecture import check_layout
from tests.unit.run.test_memory import H200, bench_config


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


# `run_all` on a host without GPUs: jobs that fail, take too long or cannot run are reported, and the others run.


def run_without_processes(
    out: Path, every: list[Job], answers: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> int:
    """Runs the jobs; each writes the first text to its log, and fails with the second."""

    def act(command: list[str], limit_s: float, log: Path) -> None:
        output, error = answers[command[0]]
        log.write_text(output)
        if error:
            raise RunError(f"{command[0]} {error}; the end of its output:\n{output}")

    monkeypatch.setattr(run_all, "run_process", act)
    monkeypatch.setattr(run_all, "jobs", lambda gpus: every)
    monkeypatch.setattr(sys, "argv", ["run_all", "--out", str(out)])
    return run_all.main()


def test_a_failed_job_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"skipped": "tests", "tested": "tests"}
    names = ("good", "bad", "slow", "large", "skipped", "tested")
    every = [Job(parts.get(name, "step"), name, (name,), gpus=8 if name == "large" else 0) for name in names]
    answers = {
        "good": ("", ""),
        "bad": ("the reason", "ended with exit code 3"),
        "slow": ("", "took longer than 2 s"),
        "skipped": ("3 skipped in 0.01s", "ended with exit code 5"),
        "tested": ("=== 3 passed, 2 skipped in 0.01s ===", ""),
    }
    (tmp_path / "good.json").write_text("{}")
    assert run_without_processes(tmp_path, every, answers, monkeypatch) == 2
    actual = json.loads((tmp_path / "jobs.json").read_text())
    assert {name: (row["result"], row["note"]) for name, row in actual.items()} == {
        "good": ("passed", ""),
        "bad": ("FAILED", "ended with exit code 3"),
        "slow": ("FAILED", "took longer than 2 s"),
        "large": ("left out", "needs 8 GPUs, found 0"),
        "skipped": ("left out", "ended with exit code 5; 3 skipped in 0.01s"),
        "tested": ("passed", "3 passed, 2 skipped in 0.01s"),
    }
    page = (tmp_path / "README.md").read_text()
    assert re.search(r"\| good \| passed \| [\d.]+ \|  \| \S* \| \[json\]\(good\.json\) \[log\]\(good\.log\) \|", page)


def test_the_page_summarizes_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, object]] = [{"stage": "sft", "loss": 3.0}]
    for number in (1, 2, 3):
        learned = {"reward/mean": 0.5 + 0.1 * number, "gen_kl_error": 1e-4 * number, "timing_s/total": 0.5}
        lines.append({"stage": "grpo", "loss": 0.1, **learned})
    (tmp_path / "runs" / "sync").mkdir(parents=True)
    (tmp_path / "runs" / "sync" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = Job("runs", "run-sync", ("run",), gpus=0)
    assert run_without_processes(tmp_path, [run], {"run": ("", "")}, monkeypatch) == 0
    assert "| 3 steps |" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "run-sync.metrics.jsonl").exists() and not (tmp_path / "runs").exists()


def test_parts_and_jobs_are_chosen_by_name() -> None:
    every = jobs(4)
    assert {job.part for job in run_all.chosen("step,peers", every)} == {"step", "peers"}
    assert [job.name for job in run_all.chosen("run-sync", every)] == ["run-sync"]
    with pytest.raises(SystemExit, match="--parts: found stepp; choose from"):
        run_all.chosen("stepp", every)
    assert len({job.name for job in every}) == len(every)


def options_of(job: Job) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(f"dagrl.bench.{job.part}").add_arguments(parser)
    words = [word.replace("{seconds}", "500") for word in job.command]
    return parser.parse_intermixed_args(words[words.index(job.part) + 1 :])


def test_benchmarks_use_existing_options_and_fit_their_gpus() -> None:
    for job in jobs(8):
        if job.part in ("tests", "runs"):
            continue
        options = options_of(job)
        if job.part == "train":
            cases = [train.parse_case(case, tiny=False) for case in options.cases]
            assert cases[0].layout.world_size == 1 or options.sides == ["dagrl"], job.name
            assert max(case.layout.world_size for case in cases) == job.gpus, job.name
            for case in cases:
                check_layout(case.shape.config, case.layout)
                assert options.rows % case.layout.dp == 0, case.name
                config, model = bench_config(case.name, options.rows, options.length, options.micro)
                assert train_memory(config.policy, Decoder.of(model), H200).total < 0.95 * H200, case.name


def configurations(gpus: int) -> dict[str, Config]:
    """Returns the configurations of the training runs for this number of GPUs, by name."""
    by_name = {}
    for run in jobs(gpus):
        if run.part == "runs" and run.gpus == gpus:
            words = [word.replace("{out}", "out") for word in run.command[run.command.index("train") + 1 :]]
            by_name[run.name] = load_config(ROOT / words[0], [*words[1:], f"cluster.num_gpus={gpus}"])
    return by_name


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_training_runs_fit_their_gpus(gpus: int) -> None:
    for name, config in configurations(gpus).items():
        plan = RunPlan.of(config)
        check_settings(config, plan)
        check_machine(config, plan)
        assert trace_phases(config, plan, worker_classes(config, plan)), name


@pytest.mark.parametrize("gpus", [2, 4])
def test_measured_steps_pass_the_preflight(tmp_path: Path, gpus: int) -> None:
    """Finds every mistake of every side that is visible before the start."""
    for job in jobs(gpus):
        if job.part == "step" and job.gpus <= gpus:
            options = options_of(job)
            for side in options.sides:
                machine = (f"cluster.num_gpus={gpus}", f"output_dir={tmp_path}", *step.overrides_of(side))
                assert preflight(load_config(options.config, [*options.overrides, *machine]))
