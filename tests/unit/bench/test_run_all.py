"""`run_all` on a host without GPUs: jobs that fail, take too long or cannot run are reported, and the others run."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagrl.bench import train
from dagrl.bench.gpu import run_all
from dagrl.bench.gpu.environment import Environment
from dagrl.bench.gpu.outcomes import Outcome, keep, kept, own_directory
from dagrl.bench.gpu.parts import ROOT, Job, jobs
from dagrl.bench.gpu.run_all import _wanted, run_job, with_what_is_installed
from dagrl.bench.gpu.runs import run_tables
from dagrl.bench.models import CHARACTERS
from dagrl.config import Config
from dagrl.config.checks import check_settings
from dagrl.config.file import load_config
from dagrl.run.preflight import preflight, trace_phases, worker_classes
from dagrl.workers.megatron.architecture import check_layout
from tests.hollow_models import write_hollow_model

CARDS = ("NVIDIA H200", "NVIDIA H200")
HERE = Environment(CARDS, (143771, 143771), "580", "NV18", "64-core host", {"torch": "2.11"}, {}, "abc", torch_gpus=2)


def job(name: str, code: str, **keys: object) -> Job:
    return replace(Job("part", name, (sys.executable, "-c", code)), **keys)  # type: ignore[arg-type]


def write_report(name: str, rows: str) -> str:
    """Returns a program that writes a report with two reasons for left-out cases."""
    left_out = '{"in flight": "the time is up", "sync": "the time is up", "large": "needs 4 GPUs"}'
    return f"open('{{out}}/{name}.json', 'w').write('{{\"rows\": {rows}, \"left_out\": {left_out}}}')"


def test_a_failed_job_does_not_stop_the_others(tmp_path: Path) -> None:
    outcomes = [
        run_job(part, HERE, tmp_path, tmp_path)
        for part in (
            job("good", "open('{out}/good.json', 'w').write('{}')"),
            job("bad", "print('the reason'); raise SystemExit(3)"),
            job("slow", "import time; time.sleep(60)", limit_s=1),
            job("unready", "print('never')", before=(sys.executable, "-c", "raise SystemExit(4)")),
            job("large", "print('never')", gpus=8),
            job("short", write_report("short", "[{}]")),
            job("late", write_report("late", "[]")),
            job("skipped", "print('3 skipped in 0.01s')", part="tests"),
            job("skips itself", "print('1 skipped in 0.01s'); raise SystemExit(5)", part="tests"),
            job("five", "raise SystemExit(5)"),
            job("tested", "print('=== 3 passed, 2 skipped in 0.01s ===')", part="tests"),
        )
    ]
    assert {outcome.job: (outcome.result, outcome.note) for outcome in outcomes} == {
        "good": ("passed", ""),
        "bad": ("FAILED", "exit code 3"),
        "slow": ("TOO LONG", "stopped after 1 s"),
        "unready": ("FAILED", "exit code 4"),
        "large": ("left out", "needs 8 GPUs, found 2"),
        "short": ("passed", "left out, the time is up: in flight, sync; left out, needs 4 GPUs: large"),
        "late": ("left out", "left out, the time is up: in flight, sync; left out, needs 4 GPUs: large"),
        "skipped": ("left out", "3 skipped in 0.01s"),
        "skips itself": ("left out", "1 skipped in 0.01s"),
        "five": ("FAILED", "exit code 5"),
        "tested": ("passed", "3 passed, 2 skipped in 0.01s"),
    }
    assert json.loads((tmp_path / "good.json").read_text()) == {}
    assert "the reason" in (tmp_path / "bad.log").read_text()


CHILD = """
import os, subprocess, sys, time
pid = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], process_group=0).pid
open('{out}/pid', 'w').write(str(pid))
"""


def test_processes_in_other_process_groups_end_with_their_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "SESSION_S", 0.3)
    assert run_job(job("ray", CHILD), HERE, tmp_path, tmp_path).result == "passed"
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_files_that_cannot_be_deleted_or_read_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rmtree = shutil.rmtree

    def busy(path: Path, *args: Any, **keys: Any) -> None:
        if path == tmp_path / "unfinished" / "runs":
            raise OSError(39, "Directory not empty", str(path))
        rmtree(path, *args, **keys)

    monkeypatch.setattr(run_all, "environment", lambda: HERE)
    monkeypatch.setattr(shutil, "rmtree", busy)
    made = job("run-sync", "import os; os.makedirs('{out}/runs/sync')", part="runs")
    torn = job("torn", "open('{out}/torn.json', 'w').write('torn')")
    monkeypatch.setattr(run_all, "jobs", lambda gpus: [made, torn, job("good", "")])
    monkeypatch.setattr(sys, "argv", ["run_all", "--out", str(tmp_path)])
    assert run_all.main() == 1
    found = {name: (row.result, row.note) for name, row in kept(tmp_path).items()}
    assert found["run-sync"] == (
        "passed",
        f"not removed: [Errno 39] Directory not empty: '{tmp_path / 'unfinished' / 'runs'}'",
    )
    assert found["torn"][0] == "FAILED" and found["torn"][1].startswith("JSONDecodeError")
    assert found["good"] == ("passed", "")


def test_limit_shortens_every_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "environment", lambda: HERE)
    monkeypatch.setattr(run_all, "jobs", lambda gpus: [job("timed", "print('left', {seconds})")])
    monkeypatch.setattr(sys, "argv", ["run_all", "--out", str(tmp_path), "--limit", "170"])
    assert run_all.main() == 0
    assert "left 119" in (tmp_path / "timed.log").read_text()
    monkeypatch.setattr(sys, "argv", ["run_all", "--limit", "30"])
    with pytest.raises(SystemExit):
        run_all.main()


def test_preparation_counts_against_a_jobs_limit(tmp_path: Path) -> None:
    timed = job(
        "timed", "print('left', {seconds})", limit_s=60, before=(sys.executable, "-c", "import time; time.sleep(1.2)")
    )
    assert run_job(timed, HERE, tmp_path, tmp_path).result == "passed"
    (left,) = re.findall(r"^left (\d+)$", (tmp_path / "timed.log").read_text(), re.MULTILINE)
    assert 1 <= int(left) < 60 - run_all.PLOT_AND_END_S - 1.1


def test_results_of_separate_runs_accumulate(tmp_path: Path) -> None:
    order = ["first", "second", "third"]
    made = tmp_path / "made"
    made.mkdir()
    for number, (outcome, files) in enumerate(
        (
            (Outcome("third", "FAILED", 2.0, "exit code 1"), ("third.log", "third.png")),
            (Outcome("second", "passed", 3.0), ("second.json", "second.png")),
            (Outcome("first", "left out", note="needs 8 GPUs, found 2"), ()),
            (Outcome("third", "passed", 4.0), ("third.json",)),
            (Outcome("second", "left out", note="a later run with less time"), ("second.json",)),
        )
    ):
        for name in files:
            (made / name).write_text(str(number))
        keep(outcome, made, order, HERE, tmp_path)
    assert [(row.job, row.result, row.seconds) for row in kept(tmp_path).values()] == [
        ("first", "left out", 0.0),
        ("second", "passed", 3.0),
        ("third", "passed", 4.0),
    ]
    page = (tmp_path / "README.md").read_text()
    assert "| third | passed | 4 |" in page and "FAILED" not in page
    assert "[json](second.json) [png](second.png)" in page and "![second](second.png)" in page
    left = {path.name: path.read_text() for path in tmp_path.glob("*.*") if path.stem in order}
    assert left == {"second.json": "1", "second.png": "1", "third.json": "3"}, "files belong to the reported outcome"


def test_parts_and_jobs_are_chosen_by_name() -> None:
    every = jobs(4)
    assert {found.part for found in _wanted("step,faults", every)} == {"step", "faults"}
    assert [found.name for found in _wanted("run-sync", every)] == ["run-sync"]
    with pytest.raises(SystemExit, match="--parts: found stepp; choose from"):
        _wanted("stepp", every)
    assert len({found.name for found in every}) == len(every)
    assert max(found.limit_s for found in every) + 2 * run_all.SESSION_S + 10 <= 600


def test_every_required_layout_has_a_job() -> None:
    gpus = {found.name: found.gpus for found in jobs(8)}
    assert {
        "refit": 2, "step-qwen3-0.6b": 2, "compare-qwen3-0.6b": 2,
        "compare-qwen3-4b": 2, "train-0.6b": 1, "train-0.6b-2": 2, "train-4b-2": 2, "train-30b-2": 2, "train-0.6b-4": 4,
        "train-4b-4": 4, "train-30b-4": 4, "train-4b-8": 8, "train-30b-8": 8, "run-colocated": 1, "run-sync": 2,
        "run-async-in-flight": 2, "run-eager": 2, "run-ep2-to-tp2": 4, "run-colocated-tp2pp2-to-tp2dp2": 4,
        "run-colocated-ep4-to-tp4": 4, "run-tp2pp2-to-tp2dp2": 8,
        "run-ep4-to-tp4": 8, "tests-refit_gpu": 1, "tests-megatron_nccl": 2,
    }.items() <= gpus.items()  # fmt: skip


def test_numbers_need_no_plotting_package(monkeypatch: pytest.MonkeyPatch) -> None:
    every = {found.name: found for found in jobs(2)}
    assert with_what_is_installed(every["refit"].command) == list(every["refit"].command)
    monkeypatch.setattr(run_all, "find_spec", lambda name: None)
    assert not [
        word
        for found in every.values()
        for word in with_what_is_installed(found.command)
        if "plot" in word and "=" not in word
    ]
    for name, found in every.items():
        added = with_what_is_installed(found.command)[-2:]
        if found.part == "runs":
            assert added == ["logger.plot_enabled=false", "logger.tensorboard_enabled=false"], name
        else:
            assert not any(word.startswith("logger.") for word in added), name
    assert run_all._obstacle(every["tests-refit_gpu"], HERE) == "missing: pytest is not installed (dagrl[dev])"


def test_test_files_declare_their_gpus() -> None:
    """A file whose tests are all skipped on one GPU is a job for two."""
    for found in jobs(8):
        if found.part == "tests":
            text = (ROOT / found.command[-1]).read_text()
            needs_two = re.search(
                r"^(    |pytestmark = .*|@)pytest\.mark\.skipif\(torch\.cuda\.device_count\(\) < 2", text, re.M
            )
            assert found.gpus == (2 if needs_two else 1), found.name


def test_training_cases_fit_their_gpus_and_models(tmp_path: Path) -> None:
    for found in jobs(8):
        if found.part != "train":
            continue
        parser = argparse.ArgumentParser()
        train.add_arguments(parser)
        words = [word.replace("{seconds}", "500") for word in found.command]
        options = parser.parse_args(words[words.index("train") + 1 :])
        cases = [train.parse_case(case, tiny=False) for case in options.cases]
        assert cases[0].layout.world_size == 1, found.name
        assert max(case.layout.world_size for case in cases) == found.gpus, found.name
        for case in cases:
            check_layout(case.shape.config, case.layout)
            assert options.rows % case.layout.dp == 0, case.name
            assert train.case_config(case, tmp_path, options).policy.train_micro_batch_size > 0, case.name


def test_jobs_use_existing_options(tmp_path: Path) -> None:
    for found in jobs(4):
        if found.bench:
            parser = argparse.ArgumentParser(exit_on_error=False)
            importlib.import_module(f"dagrl.bench.{found.bench}").add_arguments(parser)
            words = found.command[found.command.index(found.bench) + 1 :]
            parser.parse_intermixed_args([word.replace("{seconds}", "500") for word in words])


def configurations(gpus: int) -> dict[str, Config]:
    """Returns the configurations of the training runs for this number of GPUs, by name."""
    found = {}
    for run in jobs(gpus):
        if run.part == "runs" and run.gpus == gpus:
            words = [word.replace("{out}", "out") for word in run.command[run.command.index("train") + 1 :]]
            found[run.name] = load_config(ROOT / words[0], [*words[1:], f"cluster.num_gpus={gpus}"])
    return found


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_training_runs_fit_their_gpus(gpus: int) -> None:
    from dagrl.run.preflight import check_machine

    for name, config in configurations(gpus).items():
        check_settings(config)
        check_machine(config)
        assert trace_phases(config, worker_classes(config)), name


@pytest.mark.parametrize("gpus", [2, 4])
def test_measured_steps_and_faults_pass_the_preflight(tmp_path: Path, gpus: int) -> None:
    """Finds every mistake that is visible before the start; of the weights only the headers exist."""
    for found in jobs(gpus):
        if found.part not in ("step", "faults") or found.gpus > gpus:
            continue
        words = [word.replace("{models}", str(tmp_path)).replace("{seconds}", "500") for word in found.command]
        if found.before:
            write_hollow_model(tmp_path / found.before[-2], found.before[-2], CHARACTERS)
        parser = argparse.ArgumentParser()
        module = importlib.import_module(f"dagrl.bench.{found.bench or 'gpu.faults'}")
        module.add_arguments(parser)
        options = parser.parse_intermixed_args(words[words.index(found.bench or "dagrl.bench.gpu.faults") + 1 :])
        machine = (f"cluster.num_gpus={gpus}", f"output_dir={tmp_path}")
        assert preflight(load_config(options.config, [*getattr(module, "OVERRIDES", ()), *options.overrides, *machine]))


def test_the_directory_is_named_after_the_gpus() -> None:
    assert HERE.slug == "2x-nvidia-h200"


def test_the_exit_code_counts_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "environment", lambda: HERE)
    monkeypatch.setattr(run_all, "jobs", lambda gpus: [job("bad", "raise SystemExit(1)"), job("good", "")])
    monkeypatch.setattr(sys, "argv", ["run_all", "--out", str(tmp_path)])
    assert run_all.main() == 1
    assert "| bad | FAILED |" in (tmp_path / "README.md").read_text()
    assert json.loads((tmp_path / "environment.json").read_text())["memory_mib"] == [143771, 143771]


def test_a_stopped_run_keeps_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal during the second job ends it; its files are kept and the third job does not start."""
    stopping = f"""
import os, signal, time
open('{{out}}/stopped.json', 'w').write('{{"rows": []}}')
open({str(tmp_path / "pid")!r}, 'w').write(str(os.getpid()))
os.kill(os.getppid(), signal.SIGUSR1)
time.sleep(60)
"""
    monkeypatch.setattr(run_all, "environment", lambda: HERE)
    monkeypatch.setattr(
        run_all,
        "jobs",
        lambda gpus: [job("good", ""), job("stopped", stopping), job("next", "")],
    )
    monkeypatch.setattr(sys, "argv", ["run_all", "--out", str(tmp_path / "out")])
    before = signal.signal(signal.SIGUSR1, run_all.stop)
    try:
        assert run_all.main() == 130
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert {name: row.result for name, row in kept(tmp_path / "out").items()} == {"good": "passed", "stopped": "STOPPED"}
    assert (tmp_path / "out" / "stopped.json").exists() and not (tmp_path / "out" / "unfinished").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    monkeypatch.setattr(sys, "argv", ["run_all", "--out", "/proc/none"])
    with pytest.raises(SystemExit, match=r"--out /proc/none: .*; name another directory"):
        run_all.main()


def test_results_without_a_job_list_are_kept(tmp_path: Path) -> None:
    """A job that did not finish replaces nothing, and later runs write next to a hand-written page."""
    (tmp_path / "refit.json").write_text('{"rows": [1]}')
    made = tmp_path / "unfinished"
    made.mkdir()
    for result in ("left out", "missing", "STOPPED"):
        keep(Outcome("refit", result), made, ["refit"], HERE, tmp_path)
        assert (tmp_path / "refit.json").exists()
    directory = tmp_path / "2026-11-23"
    assert own_directory(directory) == directory
    directory.mkdir()
    (directory / "README.md").touch()
    assert own_directory(directory) == tmp_path / "2026-11-23-2"
    (directory / "jobs.json").touch()
    assert own_directory(directory) == directory


def test_gpus_invisible_to_torch_stop_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_all, "environment", lambda: replace(HERE, torch_gpus=0))
    monkeypatch.setattr(sys, "argv", ["run_all", "--out", str(tmp_path / "never")])
    with pytest.raises(SystemExit, match=r"nvidia-smi shows 2 GPUs, and torch 2.11 .* sees 0"):
        run_all.main()
    assert not (tmp_path / "never").exists()


def test_tables_of_runs(tmp_path: Path) -> None:
    taught = [{"step": step, "stage": "sft", "time": 0.0, "loss": 3.0 - step} for step in (1, 2)]
    learned = [
        {
            "step": step, "stage": "grpo", "time": 0.0, "loss": 0.1 * step, "reward/mean": 0.5, "gen_kl_error": 1e-4 * step,
            "timing_s/total": 0.5, "timing_s/refit": 0.001 * step, "timing_s/update_pause": 9.0, "replay_overhead_s": 0.002,
            "perf/train_fp_utilization": 0.31,
        }
        for step in (1, 2, 3)
    ]  # fmt: skip
    path = tmp_path / "run-sync.metrics.jsonl"
    path.write_text("".join(json.dumps(step) + "\n" for step in taught + learned))
    head, _, row, _, times, _, spent = run_tables([path])
    assert head.startswith("| run | SFT loss: first | last | GRPO steps")
    assert row == "| sync | 2.0000 | 1.0000 | 3 | 0.1000 | 0.3000 | 0.5000 | 0.5000 | 2.0e-04 | 3.0e-04 |"
    assert times.endswith("| MFU of train | idle train | idle generation | replay overhead ms | refit ms |")
    assert spent == "| sync | 0.500 |  | 31% |  |  | 2.0 | 3.0 |"
    assert run_tables([]) == []


def test_tables_of_runs_with_old_metric_names(tmp_path: Path) -> None:
    old = {"step": 1, "stage": "grpo", "time": 0.0, "loss": 0.1, "reward": 0.5, "gen_kl_error": None, "timing/total": 0.5}
    (tmp_path / "run-old.metrics.jsonl").write_text(json.dumps(old) + "\n" + '{"step": 2, "torn')
    row = run_tables([tmp_path / "run-old.metrics.jsonl"])[2]
    assert row == "| old |  |  | 1 | 0.1000 | 0.1000 | not recorded | not recorded | not recorded | not recorded |"
