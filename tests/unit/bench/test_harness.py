"""The loop of all benchmarks: rounds in turn, paired ratios, a deadline, sides that fail, earlier rows; and `run_all`."""

import argparse
import importlib
import io
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
from PIL import Image

from dagrl.bench import generate, harness, peers, refit, report, step, train
from dagrl.bench.gpu import run_all
from dagrl.bench.gpu.jobs import Job, jobs
from dagrl.bench.harness import ROOT, Contest, Deadline, Turn
from dagrl.bench.models import CHARACTERS, SHAPES, write_with_tokenizer
from dagrl.bench.peers.trl import lengths, unexpanded
from dagrl.bench.refit_cases import CASES, TRIALS, largest_that_fit, trials
from dagrl.bench.refit_control import Control
from dagrl.bench.refit_vllm_engines import Calls, answer_calls
from dagrl.bench.report import BenchReport
from dagrl.bench.workloads import GROUP, PICTURE_PROMPT, PICTURES, RolloutCase, grpo_config, pictures, rollout_case, rows
from dagrl.config import Config
from dagrl.config.checks import check_settings
from dagrl.config.file import load_config
from dagrl.config.plan import RunPlan
from dagrl.data.media import MediaProcessor, load_processor
from dagrl.data.tokenization import Prompt, collate, encode_demonstrations, encode_prompts
from dagrl.errors import ConfigError, RunError
from dagrl.rl.rollout.episodes import new_group, request_seeds
from dagrl.run.memory import Decoder, train_memory
from dagrl.run.model import character_tokenizer
from dagrl.run.preflight import check_machine, check_model, preflight, trace_phases, worker_classes
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.store import reserve_port
from dagrl.workers.megatron.architecture import check_layout
from tests.refit_mappings import TABLE, RefitMapping, configuration
from tests.unit.run.test_memory import H200, bench_config


@pytest.fixture(autouse=True)
def _no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the programs that benchmarks ask: git and nvidia-smi."""
    for module in (report, run_all):
        monkeypatch.setattr(module, "output_of", lambda *command: "")


def options(module: Any, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(words)


def recorded(tmp_path: Path, *words: str) -> argparse.Namespace:
    return options(harness, "--json", str(tmp_path / "rows.json"), *words)


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
    harness.run(recorded(tmp_path), [contest(sides, warmup=1)])
    assert order == ["theirs", "ours", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    ours, theirs = rows_of(tmp_path)
    assert (ours["median_s"], ours["n"], ours["rounds"], ours["tokens"]) == (1.0, 6, 3, 8) and "ratio" not in ours
    assert (theirs["ratio"], theirs["ratio_low"], theirs["ratio_high"]) == (3.0, 3.0, 4.0)
    assert theirs["rounds_s"] == [3.0, 6.0, 4.0] and theirs["kl"] == 0.5 and theirs["losses"] == [1.0, 2.0]
    assert "theirs" in capsys.readouterr().out


def test_full_sizes_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take all memory of a machine."""
    monkeypatch.setattr(harness, "gpu_count", lambda: 0)
    with pytest.raises(ConfigError, match="found no GPU; use a host with GPUs, or --tiny"):
        train.run(options(train, "--cases", "0.6b:dp1"))


def test_a_side_that_fails_leaves_the_others(tmp_path: Path) -> None:
    order: list[str] = []
    broken = Mock(side_effect=RunError("out of memory"))
    with pytest.raises(RunError, match="failed: sleep, broken"):
        harness.run(recorded(tmp_path), [contest({"ours": side("ours", order, 1.0), "broken": broken})])
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

    harness.run(recorded(tmp_path, "--deadline", "0.15", "--rounds", "9"), [contest({"ours": slow})])
    report = json.loads((tmp_path / "rows.json").read_text())
    assert report["rows"][0]["rounds"] in (1, 2) and len(report["left_out"]) == 1


def test_rounds_are_added_to_those_of_an_earlier_run(tmp_path: Path) -> None:
    def measure(first: float, *words: str, tokens: int = 8) -> None:
        one = Contest("sleep", {"short": {"tokens": tokens}}, lambda: nullcontext(sides))
        sides = {"ours": side("ours", [], 1.0), "theirs": side("theirs", [], first)}
        harness.run(recorded(tmp_path, "--rounds", "2", *words), [one])

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


def run_jobs(out: Path, every: list[Job], answers: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> int:
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
    rows = {  # output, error, result and note of each
        "good": ("", "", "passed", ""),
        "bad": ("the reason", "ended with exit code 3", "FAILED", "ended with exit code 3"),
        "slow": ("", "took longer than 2 s", "FAILED", "took longer than 2 s"),
        "large": ("", "", "left out", "needs 8 GPUs, found 0"),
        "skipped": ("3 skipped in 1 s", "ended with exit code 5", "left out", "ended with exit code 5; 3 skipped in 1 s"),
        "tested": ("=== 3 passed, 2 skipped in 0.01s ===", "", "passed", "3 passed, 2 skipped in 0.01s"),
    }
    parts = {"skipped": "tests", "tested": "tests"}
    every = [Job(parts.get(name, "step"), name, (name,), gpus=8 if name == "large" else 0) for name in rows]
    (tmp_path / "good.json").write_text("{}")
    assert run_jobs(tmp_path, every, {name: row[:2] for name, row in rows.items()}, monkeypatch) == 2
    actual = json.loads((tmp_path / "jobs.json").read_text())
    found = {name: (row["result"], row["note"]) for name, row in actual.items()}
    assert found == {name: row[2:] for name, row in rows.items()}
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
    assert run_jobs(tmp_path, [run], {"run": ("", "")}, monkeypatch) == 0
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


# Sides of `bench step`, `train`, `peers`, `generate` and `refit`: cases, configurations and the numbers of rows.


def line(seconds: float, **more: float) -> dict[str, float]:
    return {"timing_s/total": seconds, "trained_tokens": 100.0, **more}


def test_rows_of_a_run_have_medians_of_its_metrics() -> None:
    turn = step.counted([line(1.0, gen_kl_error=3.0), line(4.0, gen_kl_error=1.0), line(3.0)])
    assert turn.seconds == [1.0, 4.0, 3.0]
    assert turn.facts == {"gen_kl_error": 2.0, "trained_tokens_per_s": 300.0 / 8.0}
    with pytest.raises(RunError, match="too few steps"):
        step.counted([])


@pytest.mark.parametrize(("side", "first", "steps"), [("sync", 2, 2 + 3 + 1), ("in flight, age 4", 5, 5 + 3 + 5)])
def test_steps_that_change_a_lead_do_not_count(monkeypatch: pytest.MonkeyPatch, side: str, first: int, steps: int) -> None:
    asked: list[str] = []

    def run(config: Path, words: list[str]) -> list[dict[str, float]]:
        asked.extend(words)
        return [line(float(number)) for number in range(steps)]

    monkeypatch.setattr(step, "train_run", run)
    (turn,) = step.turn("c", options(step, "--steps", "3"), step.overrides_of(side)).values()
    assert f"grpo.max_num_steps={steps}" in asked
    assert turn.seconds == [float(first), first + 1.0, first + 2.0]


def test_sides_are_known_or_have_overrides() -> None:
    assert step.overrides_of("fp8: policy.precision=x a.b=c") == ["policy.precision=x", "a.b=c"]
    with pytest.raises(ConfigError, match=r"found 'synk'; expected 'NAME: a\.b=c \.\.\.' or one of sync; eager"):
        step.overrides_of("synk")


def test_training_cases(tmp_path: Path) -> None:
    case = train.parse_case("30b@4:dp4ep4 policy.precision=float32", tiny=False)
    assert (case.shape.config["num_hidden_layers"], case.layout.ep, case.overrides) == (4, 4, ("policy.precision=float32",))
    config = Config.model_validate(train.sft_config(tmp_path, 16, 2048, 2, "bfloat16", case.layout))
    assert config.policy.megatron_cfg.expert_model_parallel_size == 4 and config.policy.train_micro_batch_size == 2
    case = train.parse_case("4b:dp2tp2 policy.backend=fsdp", tiny=False)
    config = Config.model_validate(train.sft_config(tmp_path, 16, 2048, 2, "bfloat16", case.layout, case.fsdp))
    assert config.policy.fsdp_cfg.layout == case.layout == ParallelLayout(dp=2, tp=2)
    for wrong in ("4b:dp1:lora", "5b:dp1", ""):
        with pytest.raises(ConfigError, match="expected MODEL:LAYOUT"):
            train.parse_case(wrong, tiny=False)


def test_losses_are_compared_with_the_first_case_of_the_model() -> None:
    sizes = {"model": "4b", "gpus": 2, "tokens": 100, "tflop": 1.0, "median_s": 0.5}
    first, second = train.finish([{**sizes, "losses": [3.0, 4.0]}, {**sizes, "losses": [3.0, 4.5, 9.0]}])
    assert (first["loss_error"], second["loss_error"], first["tokens_per_s_per_gpu"]) == (0.0, 0.1, 100.0)


def test_demonstrations_have_the_requested_length() -> None:
    """A prompt of one token; all later tokens, among them the end of the text, are learned."""
    batch = collate(encode_demonstrations(rows(3, 17).demonstrations, character_tokenizer(CHARACTERS)))
    assert batch["lengths"].tolist() == [17] * 3 and batch["loss_mask"].sum() == 3 * 16


def test_rollouts_fit_the_configuration_of_a_run(tmp_path: Path) -> None:
    case = rollout_case("grpo 0.6b 128", "0.6b", "128", 256, micro=None, tiny=False, kv_share=1e3)
    config = Config.model_validate(grpo_config(case, tmp_path, {}))
    check_settings(config, RunPlan.of(config))
    assert config.grpo.num_prompts_per_step * GROUP == 128 and config.policy.train_micro_batch_size == 16
    shape: Any = SHAPES["qwen3-0.6b"].config
    # Completions with one block more each, prompts once a group, and one block of slack each.
    blocks, size = 128 * 17 + 16 * 8 + 16, shape["num_key_value_heads"] * shape["head_dim"]
    assert case.kv_bytes == blocks * 16 * 2 * 2 * shape["num_hidden_layers"] * size
    assert RolloutCase(**asdict(case)) == case


def test_trl_trains_and_samples_on_the_tokens_of_dagrl(tmp_path: Path) -> None:
    """TRL trains on what the processor writes; vLLM expands what the tokenizer writes, one placeholder an image."""
    processor: Any = load_processor(write_with_tokenizer(SHAPES["qwen3-vl-2b"].narrowed(), tmp_path))
    examples, whole = pictures(len(PICTURES)).train, []
    for example, tokens in zip(examples, (196, 300, 475, 768), strict=True):
        (file,), (_, question) = example.messages[0].media, example.messages[0].content
        content = [{"type": "image", "image": Image.open(io.BytesIO(file.data))}, question]
        chat = [{"role": "user", "content": content}]
        written = processor.apply_chat_template([chat], add_generation_prompt=True, tokenize=True, return_dict=True)
        whole += written["input_ids"]
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        assert unexpanded(whole[-1], 6) == processor.tokenizer(text)["input_ids"]
        assert (len(whole[-1]), whole[-1].count(6)) == (tokens + 55, tokens)
    assert max(map(len, whole)) <= PICTURE_PROMPT
    prompts = encode_prompts(examples, processor.tokenizer, MediaProcessor(processor))
    assert [prompt.tokens.tolist() for prompt in prompts] == whole


def test_completions_of_a_peer_have_the_lengths_of_ours() -> None:
    case = rollout_case("", "0.6b", "16", 64, micro=1, tiny=True, kv_share=0.1, prompt=40, median=16)
    config = Config.model_validate(grpo_config(case, Path("m")))
    prompt = Prompt("", np.zeros(case.prompt, np.int64), "", "")
    numbers = count()
    for first in (0, 2):  # two steps
        groups = [new_group(config, n, n, prompt, request_seeds(config.seed, n, GROUP)) for n in (first, first + 1)]
        limits = [episode.max_new_tokens for group in groups for episode in group.episodes]
        assert lengths(case, numbers, 2) == limits and len(set(limits)) > 8 and max(limits) <= 64


@pytest.mark.parametrize(
    ("module", "case", "message"),
    [
        (peers, "ppo 0.6b 128", "with a kind of grpo or sft; found 'ppo'"),
        (peers, "grpo 0.6b 12", "in whole groups of 8"),
        (peers, "sft 7b 16", "expected a model of 0.6b, 1.7b, 4b"),
        (generate, "0.6b", "and a number of sequences"),
    ],
)
def test_malformed_cases_are_rejected_before_measuring(module: Any, case: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        module.run(options(module, "--cases", case))


def test_peers_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken: dict[str, Any] = {}
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "torchtitan" else True)
    monkeypatch.setattr(peers.harness, "run", lambda *words: taken.update(contests=words[1], left_out=words[4]))
    monkeypatch.setattr(peers, "write_with_tokenizer", lambda *words: tmp_path)
    peers.run(options(peers, "--cases", "sft 0.6b 16", "grpo 0.6b 8"))
    assert taken["left_out"] == {"torchtitan": "torchtitan is not installed"}
    assert [contest.name for contest in taken["contests"]] == ["sft 0.6b 16", "grpo 0.6b 8"]


class Ranks:
    """Ranks that answer at once: two senders, and two receivers of which one has a wrong parameter."""

    def __init__(self, wrong: list[str]) -> None:
        self.wrong = wrong

    def ask(self, command: str, *arguments: object) -> list[dict[str, Any]]:
        facts = {"bytes_into_rank": 8 * 10**9, "raw_gb_per_s": 400.0, "staging_bytes": 10**6}
        answers = [{"seconds": [0.01, 0.02], "wrong": [], "holder": "modules", "facts": facts} for _ in range(4)]
        answers[2] |= {"seconds": [0.04, 0.02], "wrong": self.wrong}
        return answers


def test_the_slowest_rank_counts() -> None:
    case = TRIALS[0]
    (turn,) = refit.turn(Ranks([]), case, "dagrl", 2).values()  # type: ignore[arg-type]
    assert turn.seconds == [0.04, 0.02]
    (row,) = refit.finish([{"median_s": 0.04, **turn.facts}])
    assert (row["gb_per_s"], row["share_of_raw"], row["staging_mb"]) == (200.0, 0.5, 1.0)


def test_wrong_parameters_fail_the_method() -> None:
    with pytest.raises(RunError, match=r"wrong parameters: 1, such as lm_head\.weight"):
        refit.turn(Ranks(["lm_head.weight"]), TRIALS[0], "packed broadcast", 2)  # type: ignore[arg-type]


def test_a_case_needs_the_gpus_of_both_sides() -> None:
    wanted = "4B TP2PP2->TP4"
    chosen, left_out = largest_that_fit(8, 140 << 30, [wanted])
    assert [case.name for case in chosen] == [wanted]
    assert not left_out
    chosen, left_out = largest_that_fit(4, 140 << 30, [wanted])
    assert not chosen
    assert left_out == {f"{wanted} bf16": "needs 8 GPUs, found 4"}
    assert len({(case.name, case.dtype) for case in CASES}) == len(CASES)
    chosen, left_out = largest_that_fit(1, 24 << 30, ["4B TP1->TP1"])
    found = [(case.name, case.dtype, case.ranks) for case in chosen]
    assert found == [("4B TP1->TP1 colocated", dtype, 2) for dtype in ("bf16", "fp8")]
    assert left_out["4B TP1->TP1 bf16"] == "needs 2 GPUs, found 1"
    assert "needs 20 GB" in largest_that_fit(1, 16 << 30, ["4B TP1->TP1 colocated"])[1]["4B TP1->TP1 colocated bf16"]
    assert [case.name for case in trials(["trial TP2PP2"])] == ["trial TP2PP2->TP4"]


@pytest.mark.parametrize("mapping", TABLE, ids=str)
def test_every_mapping_can_be_planned(mapping: RefitMapping) -> None:
    """`dagrl inspect` makes these checks first; it takes models that the train worker does not support."""
    config = Config.model_validate(configuration(mapping))
    check_settings(config, RunPlan.of(config))
    check_model(config, mapping.model)


def test_calls_of_vllms_trainer_run_on_the_generation_rank() -> None:
    """One of two updates is rejected."""
    port, engine = reserve_port(), Mock()
    engine.update_weights.side_effect = [ValueError("no such parameter"), None]

    def generation() -> None:
        control = Control(port, 1, 2, 20)
        answer_calls(control, engine)
        control.barrier()

    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(generation)
        control = Control(port, 0, 2, 20)
        calls = Calls(control)
        calls.start_weight_update()
        with pytest.raises(RunError, match="no such parameter"):
            calls.update_weights("bad")
        calls.update_weights({"names": ["a"]})
        calls.finish_weight_update()
        calls.call("done")
        control.barrier()
        answered.result(20)
    updates = call.update_weights("bad"), call.update_weights({"names": ["a"]})
    assert engine.mock_calls == [call.start_weight_update(), *updates, call.finish_weight_update()]
