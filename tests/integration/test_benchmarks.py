"""`bench overhead`, `step` and `train` in short, and the processes of sides."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dagrl.bench import train
from dagrl.bench.harness import ROOT, run_process
from dagrl.bench.overhead import PHASES, SIDES
from dagrl.bench.refit_cases import TRIALS
from dagrl.bench.report import check_plot, commit, plot
from dagrl.errors import ConfigError, RunError
from tests.integration.processes import alive, ends_within


def rows_of(tmp_path: Path, *words: str) -> Any:
    """Measures in a process of its own, as other tests' Ray may run in this one."""
    report = tmp_path / "rows.json"
    run_process([sys.executable, "-m", "dagrl.cli.main", "bench", *words, "--json", str(report)], 500)
    found = json.loads(report.read_text())
    return found["rows"] if isinstance(found, dict) else found


@pytest.mark.slow
def test_every_side_of_every_shape_is_measured(tmp_path: Path) -> None:
    words = ["--quick", "--workers", "2", "--payloads", "100", "--seconds", "0.01", "--rounds", "2", "--replays", "200"]
    rows = rows_of(tmp_path, "overhead", *words)
    found = [(row["shape"], row["side"]) for row in rows[:-1]]
    assert found == [(shape, side) for shape in PHASES for side in SIDES]
    many = rows[-1]
    assert many["n"] == 400 and 0 < many["median_s"] <= many["p99_s"] and many["cpu_us"] > 0
    assert 0 <= many["waiting_cores"] < 3, "each of three processes burns at most a core"


def test_a_process_that_fails_or_is_late_ends_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"(?s)ended with exit code 3; the end of its output:\nthe reason"):
        run_process([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], 60)
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    with pytest.raises(RunError, match="took longer than 2 s"):
        run_process([sys.executable, "-c", code], 2, log=tmp_path / "log")
    child = int((tmp_path / "log").read_text())
    assert ends_within(10.0, lambda: alive(child)), "the child lives"


SMALL = (
    *("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4"),
    *("policy.train_global_batch_size=16", "policy.max_total_sequence_length=48"),
    *("policy.generation.max_new_tokens=32", "policy.generation.forced_lengths.median=8"),
    "data.task_args={count: 16, train_s: 0.02, engine_step_s: 0.002}",
)


@pytest.mark.slow
def test_whole_runs_are_compared(tmp_path: Path) -> None:
    words = [*SMALL, "--steps", "2", "--rounds", "1", "--sides", "sync", "in flight, age 1"]
    sync, in_flight = rows_of(tmp_path, "step", *words)
    assert (sync["n"], in_flight["n"], sync["staleness/policy_age_mean"]) == (2, 2, 0)
    assert 0 < in_flight["staleness/policy_age_mean"] <= 1
    for row in (sync, in_flight):
        tokens = row["trained_tokens_per_s"] * sum(row["steps_s"][0])
        assert 2 * 16 * 3 <= tokens <= 2 * 16 * 48 and 0 <= row["idle/train"] <= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plain_megatron_loop_has_the_losses_of_a_run(tmp_path: Path) -> None:
    """Of one worker and of two tensor-parallel ones, from the same checkpoint on the same rows."""
    pytest.importorskip("megatron.core")
    words = ["--tiny", "--cases", "0.6b:dp1", "0.6b:tp2", "--rows", "4", "--length", "32", "--steps", "2", "--rounds", "1"]
    rows = rows_of(tmp_path, "train", *words)
    assert [(row["gpus"], row["side"]) for row in rows] == [(gpus, side) for gpus in (1, 2) for side in train.SIDES]
    assert rows[0]["losses"][0] > rows[0]["losses"][-1]
    assert max(row["loss_error"] for row in rows) < 1e-6


def test_a_report_names_the_commit_of_the_checkout() -> None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        pytest.skip("not a checkout")
    found = commit.__wrapped__().removesuffix("+changes")
    assert len(found) >= 12 and done.stdout.startswith(found)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_every_trial_by_every_method(tmp_path: Path) -> None:
    """A parameter that is wrong after a turn would be an error of its side."""
    rows = rows_of(tmp_path, "refit", "--trial", "--repeats", "1", "--rounds", "2")
    for case in TRIALS:
        found = {row["side"]: row for row in rows if row["case"] == case.label}
        assert found["dagrl"]["rounds"] == 2 and found["dagrl"]["bytes_into_rank"] > 0
        assert "dagrl verify=checksum" in found


@pytest.mark.slow
def test_rows_of_architectures(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    names = ["GptOssForCausalLM", "NemotronHForCausalLM", "Qwen3ForCausalLM", "NoSuchModel"]
    found = rows_of(tmp_path, "refit", "--architectures", "--names", *names)
    rows = {(row["architecture"], row["source"], row["tp"]): row for row in found}
    sources = [(name, source) for name in names[:3] for source in ("hf", "dtensor")] + [("Qwen3ForCausalLM", "megatron")]
    assert all(rows[*one, tp]["passed"] for one in sources for tp in (1, 2)), rows
    missing = rows["NoSuchModel", "hf", 1]
    assert not missing["passed"] and "no model of this name" in missing["reason"]


def test_rows_can_be_drawn_on_any_machine(tmp_path: Path) -> None:
    """The first time on a machine, matplotlib asks a program which fonts there are."""
    row = {"case": "chain", "side": "dagrl", "median_s": 2e-3, "low_s": 1e-3, "high_s": 4e-3}
    plot([row, {**row, "side": "Ray graph"}, {**row, "case": "reduce"}], tmp_path / "rows.svg")
    assert "Ray graph" in (tmp_path / "rows.svg").read_text()
    with pytest.raises(ConfigError, match=r"--plot .*a\.xyz: cannot draw file type '\.xyz'; use one of .*png"):
        check_plot(tmp_path / "a.xyz")
