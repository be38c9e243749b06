"""The main job as a user runs it: what it learns, what it writes, and that both executors agree exactly."""

import collections
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dagrl.cli.main import main
from dagrl.config.file import load_config
from dagrl.rl.rollout.rollouts import IN_FLIGHT
from dagrl.telemetry.rollouts import OTHER, read_rollouts, rollout_files
from dagrl.telemetry.trace import _ORIGIN_PERIOD_NS
from tests.integration.main_job import (
    GRPO,
    GRPO_STEPS,
    LEARNING,
    ROOT,
    SECRETS,
    SFT_STEPS,
    SMALL,
    STEPS,
    Metrics,
    Run,
    copy_run,
    train,
    untimed,
)

pytest.importorskip("megatron.core")
pytest.importorskip("vllm")

REPLAYS = {"demonstration_step": SFT_STEPS, "train_step": GRPO_STEPS, "refit": GRPO_STEPS + 1, "logprobs": GRPO_STEPS}


def rewards(run: Run) -> dict[int, float]:
    """Returns the mean validation reward by step."""
    return {line["step"]: line["validation/reward"] for line in run.metrics if "validation/reward" in line}


def test_grpo_learns_where_sft_left_off(learned: Run) -> None:
    found = rewards(learned)
    assert 0.1 <= found[SFT_STEPS] <= 0.5
    assert found[STEPS] > found[SFT_STEPS] + 0.25


def test_the_terminal_shows_progress(learned: Run) -> None:
    for text in ("Starting 2 train workers (dp2) and 1 generation workers", "Compiling phases", "Warming up"):
        assert f"✓ {text}" in learned.shown
    for text in ("warm-up while others start: demonstration_step", "warm-up: generate"):
        assert text in learned.shown
    for text in (f"{GRPO_STEPS}/{GRPO_STEPS} steps", "Where the time went", "train_step", "Written"):
        assert text in learned.shown
    for text in ("━", "GRPO", "reward 0.", "loss ", "kl ", "tokens/s", "left, until"):
        assert text in learned.drawn


def test_the_configuration_is_saved_as_it_was_resolved(learned: Run) -> None:
    overrides = [f"output_dir={learned.directory.parent}", "name=learned", *LEARNING]
    derived = ["policy.backend=megatron", "policy.generation.stop_token_ids=[2]"]
    resolved = load_config(ROOT / GRPO, [*overrides, *derived])
    assert load_config(learned.directory / "config.yaml", []) == resolved


def test_every_step_is_recorded_and_generation_agrees_with_training(learned: Run) -> None:
    stages = [(line["stage"], line["step"]) for line in learned.metrics]
    sft, grpo = ([step for name, step in stages if name == stage] for stage in ("sft", "grpo"))
    assert sft == list(range(SFT_STEPS + 1)) and grpo == list(range(SFT_STEPS, STEPS + 1))  # with a validation at the start
    for line in learned.metrics:
        if "grad_norm" in line:
            slowest = max(line[f"perf/rank_{rank}/train_seconds"] for rank in range(2))
            assert line["perf/train_seconds"] == slowest and line["perf/train_tflops_per_gpu"] > 0
            assert "perf/train_fp_utilization" not in line  # a CPU has no peak to compare with
        if "reward/mean" in line:
            assert line["max_logprob_difference"] < 1e-4
            assert abs(line["token_mult_prob_error"] - 1) < 1e-4


def test_tensorboard_has_the_same_numbers(learned: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(learned.directory / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in ("reward/mean", "loss", "policy/kl", "validation/reward", "timing_s/generate"):
        written = [(line["step"], line[name]) for line in learned.metrics if line["stage"] == "grpo" and name in line]
        found = [(event.step, event.value) for event in events.Scalars(f"grpo/{name}")]
        np.testing.assert_allclose(found, written, rtol=1e-6)


def test_the_trace_has_every_replay_on_every_worker(learned: Run) -> None:
    events = json.loads((learned.directory / "trace.json").read_text())
    rows = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found: dict[str, dict[str, set[int]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    for event in events:
        if event["ph"] == "X" and event["cat"] == "replay":
            assert event["dur"] > 0
            found[event["args"]["phase"]][rows[event["pid"]].partition(" (")[0]].add(event["args"]["replay"])
    everyone = {"train 0", "train 1", "generation 0"}
    for phase, workers in found.items():
        expected = {"refit": everyone, "generate": {"generation 0"}}.get(phase, {"train 0", "train 1"})
        assert set(workers) == expected
        assert len({frozenset(replays) for replays in workers.values()}) == 1, f"workers of {phase} ran other replays"
    counts = {phase: len(next(iter(workers.values()))) for phase, workers in found.items()}
    assert {phase: counts[phase] for phase in REPLAYS} == REPLAYS
    recorded = sum(line.get("replays", 0) for line in learned.metrics)
    before = len(replays_before_first_steps(learned, events))
    assert (
        before > 0 and abs(recorded + before - sum(counts.values())) <= IN_FLIGHT
    )  # quanta that nobody waited for at the end


def test_every_trained_sample_is_kept_with_its_tokens_and_logprobs(learned: Run) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(learned.directory / "final_model")
    files = rollout_files(learned.directory / "rollouts")
    assert list(files) == list(range(SFT_STEPS + 1, STEPS + 1))
    metrics = {line["step"]: line for line in learned.metrics if "reward/mean" in line}
    for step, path in files.items():
        rows = read_rollouts(path)
        left, right = (np.concatenate([row[name] for row in rows]) for name in ("train_logprobs", "logprobs"))
        assert np.abs(left - right).max() == pytest.approx(metrics[step]["max_logprob_difference"], abs=1e-6)
        assert np.mean([row["reward"] for row in rows]) == pytest.approx(metrics[step]["reward/mean"])
        assert {version for row in rows for version in row["versions"]} == {step - 1}
        for row in rows:
            assert row["reward"] == float(row["completion"] == row["reference"])
            assert tokenizer.decode(row["prompt_tokens"]) == row["prompt"]
            (turn,) = row["turns"]
            text, end = tokenizer.decode(row["tokens"]), len(row["tokens"])
            assert turn == {"role": "policy", "text": text, "start": 0, "end": end, "reward": None}
    first, last = (read_rollouts(path) for path in (files[SFT_STEPS + 1], files[STEPS]))
    differences = [
        max(np.abs(np.subtract(row["train_logprobs"], row["reference_logprobs"])).max() for row in rows)
        for rows in (first, last)
    ]
    assert differences[0] < 1e-5 < differences[1], "the policy begins as the reference"
    for group in range(0, len(first), 8):  # the quickstart's groups; leave one out, divided by the standard deviation
        rewards, advantages = (np.array([row[name] for row in first[group : group + 8]]) for name in ("reward", "advantage"))
        assert (np.sign(advantages) == np.sign(rewards - rewards.mean())).all()


def test_validation_samples_are_kept_too(learned: Run) -> None:
    files = rollout_files(learned.directory / "rollouts", OTHER)
    validated = {line["step"]: line for line in learned.metrics if "validation/reward" in line}
    assert list(files) == sorted(validated) != []
    for step, path in files.items():
        rows = read_rollouts(path)
        assert {row["split"] for row in rows} == {"validation"} and all(row["valid"] for row in rows)
        assert np.mean([row["reward"] for row in rows]) == pytest.approx(validated[step]["validation/reward"])
        assert {version for row in rows for version in row["versions"]} == {step}, "the policy after the step made them"


@pytest.mark.slow
def test_a_step_is_executed_again_and_a_changed_record_is_named(learned: Run, tmp_path: Path) -> None:
    directory, step = tmp_path / "copy", SFT_STEPS + 2
    copy_run(learned.directory, directory, SFT_STEPS)  # has the checkpoint before the step
    lines = [{**line, "loss": 9.0} if line["step"] == step else line for line in learned.metrics]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    dagrl = str(Path(sys.executable).with_name("dagrl"))
    command = [dagrl, "replay", str(directory), "--step", str(step + 1)]  # from the checkpoint, through the changed one
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
    said = " ".join((ended.stdout + ended.stderr).split()).partition(f"step {step}: loss was 9.0, and is now ")[2]
    assert said.count("and is now") == 0 and float(said.split()[0]) == next(
        line["loss"] for line in learned.metrics if line["step"] == step and "loss" in line
    )


@pytest.mark.usefixtures("one_cluster")
def test_evaluation_is_greedy_and_counts_right_answers(
    learned: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final, file = learned.directory / "final_model", tmp_path / "found.json"
    options = ["--checkpoint", str(final), "--samples", "4", "--limit", "32", "--json", str(file)]
    assert main(["evaluate", str(ROOT / GRPO), *options]) == 0
    shown = capsys.readouterr().out
    (found,) = json.loads(file.read_text())
    metrics, prompts = found["metrics"]["all"], found["prompts"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32), AutoTokenizer.from_pretrained(final)
    tokens = tokenizer([one["prompt"] for one in prompts], return_tensors="pt", padding=True, padding_side="left")
    made = model.generate(**tokens, max_new_tokens=4, do_sample=False)[:, tokens["input_ids"].shape[1] :]
    expected = tokenizer.batch_decode(made, skip_special_tokens=True)
    greedy = [[item["text"] for item in one["completions"] if item["greedy"]] for one in prompts]
    assert greedy == [[text] for text in expected] and len(prompts) == 32
    right = [[item["text"] == one["reference"] for item in one["completions"] if not item["greedy"]] for one in prompts]
    assert metrics["greedy/right"] == np.mean(
        [text == one["reference"] for text, one in zip(expected, prompts, strict=True)]
    )
    assert metrics["pass@1"] == pytest.approx(np.mean(right)) and metrics["pass@4"] == np.mean([any(row) for row in right])
    assert f"{metrics['pass@1']:.4f}" in shown and 0 < metrics["pass@1"] < metrics["pass@4"]


@pytest.mark.usefixtures("one_cluster")
def test_a_checkpoint_is_exported_bit_for_bit(learned: Run, tmp_path: Path) -> None:
    latest, model = learned.directory / "checkpoints" / f"step_{STEPS:08d}", tmp_path / "model"
    assert main(["export", str(latest), "-o", str(model)]) == 0
    found, final = (load_file(path / "model.safetensors") for path in (model, learned.directory / "final_model"))
    assert found.keys() == final.keys() and all(torch.equal(found[key], final[key]) for key in final)
    assert (model / "tokenizer.json").exists()


def replays_before_first_steps(run: Run, events: list[Metrics]) -> set[tuple[str, int]]:
    """Returns events between two stages: validation and the first refit."""
    steps = [line for line in run.metrics if "timing_s/total" in line]
    origin = steps[0]["time"] // (_ORIGIN_PERIOD_NS / 1e9) * (_ORIGIN_PERIOD_NS / 1e9)
    ends: dict[tuple[str, int], float] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] == "replay":
            replay = event["args"]["phase"], event["args"]["replay"]
            ends[replay] = max(ends.get(replay, 0.0), origin + (event["ts"] + event["dur"]) / 1e6)
    found, ended = set(), 0.0
    for stage in ("sft", "grpo"):
        mine = [line for line in steps if line["stage"] == stage]
        begun = mine[0]["time"] - mine[0]["timing_s/total"]
        found |= {replay for replay, end in ends.items() if ended < end < begun}
        ended = mine[-1]["time"]
    return found


def test_secrets_of_the_environment_are_written_nowhere(learned: Run) -> None:
    (secret,) = SECRETS.values()
    files = [path for path in learned.directory.rglob("*") if path.is_file()]
    assert secret not in learned.drawn and len(learned.commands) > 5 and len(files) > 20
    written = [str(path) for path in files if secret.encode() in path.read_bytes()]
    assert written == [] and not any(secret in command for command in learned.commands)


def test_the_first_step_is_timed_from_the_end_of_the_warm_up(learned: Run) -> None:
    events = json.loads((learned.directory / "trace.json").read_text())
    warm = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X" and event["cat"] == "warm-up")
    first = next(line for line in learned.metrics if "timing_s/total" in line)
    origin = first["time"] // (_ORIGIN_PERIOD_NS / 1e9) * (_ORIGIN_PERIOD_NS / 1e9)
    assert first["time"] - first["timing_s/total"] >= origin + warm / 1e6 - 2e-3, "the time is written to a millisecond"


@pytest.mark.slow
def test_both_executors_give_the_same_losses_and_tokens(tmp_path: Path) -> None:
    compiled, eager = (train(GRPO, tmp_path, name, *SMALL, f"executor={name}") for name in ("compiled", "eager"))
    assert untimed(eager.metrics) == untimed(compiled.metrics)  # bit for bit
    completions = [json.loads(line) for line in eager.completions.read_text().splitlines()]
    assert completions == [json.loads(line) for line in compiled.completions.read_text().splitlines()]
    assert len({text for _, texts in completions for text in texts}) > 100


def losses(run: Run) -> list[float]:
    return [line["validation/loss"] for line in run.metrics if "validation/loss" in line]
