"""Predicted times are within 20 % of what GPUs have measured, in runs to which no rate was fitted."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagrl.bench import workloads
from dagrl.bench.workloads import grpo_config, rollout_case
from dagrl.cli.inspect import step_times
from dagrl.cli.main import main
from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.config.plan import RunPlan
from dagrl.machine import Gpu
from dagrl.run import step_time
from dagrl.run.memory import Decoder, RoleMemory
from dagrl.run.step_time import GPUS, Rows, generated_rows, run_times, step_seconds, train_time
from dagrl.workers.train import cudnn_attention
from tests.unit.run.test_memory import FSDP, PACKED, bench_config

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "dagrl" / "bench" / "results"
H200 = GPUS["H200"]
GRAPHS = " policy.megatron_cfg.cuda_graphs=true"
FLASH = " policy.deterministic=true"  # FlashAttention 2 for packed rows, as before cuDNN computed them
FULL, SELECTIVE, OFFLOADED = (
    f" policy.fsdp_cfg.activation_checkpointing={kind}" for kind in ("full", "selective", "offloaded")
)
UNCOMPILED = " policy.backend=fsdp"
FSDP_RESULTS = "1x-nvidia-h200/2026-11-29/fsdp.json"
TWO_GPUS = "2x-nvidia-h200/2026-11-30/fsdp.json"
SHARDED = " policy.megatron_cfg.use_distributed_optimizer=true"

SFT = [  # name in docs/gpu.md; case, rows, length and sequences of a microbatch of `dagrl bench train`; file, row
    ("", ("0.6b:dp1" + GRAPHS, 16, 2048, 8), "4x-nvidia-h200/2026-11-26/train-0.6b.json", 0),
    ("", ("0.6b:dp1", 16, 2048, 8), "4x-nvidia-h200/2026-11-26/train-0.6b.json", 1),
    ("", ("0.6b:dp1" + PACKED + GRAPHS, 4, 8192, 2), "1x-nvidia-h200/2026-11-29/train-0.6b-8k.json", 0),
    ("", ("0.6b:dp1" + PACKED + GRAPHS + FLASH, 4, 8192, 2), "1x-nvidia-h200/2026-11-29/train-0.6b-8k.json", 1),
    ("", ("4b:dp1", 16, 2048, 4), "4x-nvidia-h200/2026-11-26/train-4b.json", 0),
    ("8B with 28 layers", ("8b@28:dp1", 64, 2048, 1), "2x-nvidia-h200/2026-11-26/train-8b.json", 0),
    ("4B with 18 layers", ("4b@18:dp1", 16, 2048, 2), "2x-nvidia-h200/2026-11-26/train-checkpoint.json", 0),
    ("4B, 4,096 tokens, packed", ("4b:dp1" + PACKED, 8, 4096, 2), "2x-nvidia-h200/2026-11-27/train-4b-4k.json", 2),
    ("... by FlashAttention 2", ("4b:dp1" + PACKED + FLASH, 8, 4096, 2), "2x-nvidia-h200/2026-11-27/train-4b-4k.json", 3),
    (
        "30B-A3B with 3 layers",
        ("30b@3:dp1" + PACKED + FLASH, 16, 2048, 4),
        "2x-nvidia-h200/2026-11-26/train-experts.json",
        0,
    ),
    ("1.7B, FSDP, microbatches of 16", ("1.7b:dp1" + FSDP, 32, 2048, 16), "1x-nvidia-h200/2026-11-30/train.json", 0),
    ("4B, FSDP, microbatches of 6", ("4b:dp1" + FSDP, 18, 2048, 6), "1x-nvidia-h200/2026-11-30/train.json", 1),
    ("0.6B, microbatches of 16", ("0.6b:dp1", 32, 2048, 16), "1x-nvidia-h200/2026-11-30/train.json", 2),
    ("0.6B, FSDP", ("0.6b:dp1" + FSDP, 16, 2048, 8), f"{FSDP_RESULTS}#sft", 1),
    ("4B, 65,536 tokens, FSDP, `selective`", ("4b:dp1" + SELECTIVE + FSDP, 1, 65536, 1), f"{FSDP_RESULTS}#long", 1),
    ("4B, 61,440 tokens, FSDP, `full`", ("4b:dp1" + FULL + FSDP, 1, 61440, 1), "1x-nvidia-h200/2026-11-30/train.json", 21),
    ("4B, 131,072 tokens, FSDP, `offloaded`", ("4b:dp1" + OFFLOADED + FSDP, 1, 131072, 1), f"{FSDP_RESULTS}#long", 2),
    ("0.6B, 262,144 tokens, FSDP, `selective`", ("0.6b:dp1" + SELECTIVE + FSDP, 1, 262144, 1), f"{FSDP_RESULTS}#long", 3),
    ("4B, FSDP DP2, two GPUs", ("4b:dp2" + FSDP, 16, 2048, 4), TWO_GPUS, 8),
    ("4B, TP2, two GPUs", ("4b:tp2", 16, 2048, 4), TWO_GPUS, 9),
    ("4B, 65,536 tokens, FSDP CP2, `selective`, two GPUs", ("4b:cp2" + SELECTIVE + UNCOMPILED, 1, 65536, 1), TWO_GPUS, 10),
    ("30B-A3B with 8 layers, FSDP", ("30b@8:dp1" + FSDP, 16, 2048, 4), f"{FSDP_RESULTS}#experts", 0),
]
"""Rates were fitted to runs without a name."""
GENERATION = [  # model, sequences, completion, file, row: fitted, too
    (("0.6b", 64, 256), "2x-nvidia-h200/2026-11-27/peers-generate.json", 0),
    (("0.6b", 256, 256), "4x-nvidia-h200/2026-11-27/peers-generate.json", 0),
    (("0.6b", 1024, 256), "4x-nvidia-h200/2026-11-27/peers-generate.json", 1),
    (("0.6b", 64, 4096), "4x-nvidia-h200/2026-11-27/peers-generate-long.json", 0),
]
DECODING = "1x-nvidia-h200/2026-11-30/decode.json"
FITTED = [("1.7b", 256, f"{DECODING}#rows", 19), ("0.6b", 64, f"{DECODING}#alone", 2)]  # with our kernels; 384 tokens
OLDER = {"policy.worker": "dagrl:MegatronWorker", "policy.deterministic": True}  # as `FLASH`, and vLLM's own kernels
NOW = {"policy.backend": "fsdp", "policy.fsdp_cfg.torch_compile": True, "policy.sequence_packing.train_mb_tokens": 16384}
SHARED = NOW | {"policy.sequence_packing.shared_prefix": True}
PEERS = "1x-nvidia-h200/2026-11-30/peers-grpo.json"
GRPO = [  # name, keys; model, sequences, completion, sequences of a microbatch, prompt; file, row
    ("0.6B, 2,048 x (120 + 256)", OLDER, ("0.6b", 2048, 256, 16), "2x-nvidia-h200/2026-11-26/peers-grpo-2048.json", 0),
    ("4B, 512 x (120 + 256)", OLDER, ("4b", 512, 256, 4), "2x-nvidia-h200/2026-11-26/peers-grpo-4b.json", 0),
    ("0.6B, 64 x (120 + 4,096), FSDP", NOW, ("0.6b", 64, 4096, 2), PEERS, 2),
    ("1.7B, 256 x (200 + 384), FSDP, shared prompts", SHARED, ("1.7b", 256, 384, 8, 200), PEERS, 0),
]
ALONE = {"0.6b": (6, "2x-nvidia-h200/2026-11-23/train-0.6b.json"), "4b": (4, "2x-nvidia-h200/2026-11-23/train-4b.json")}
LAYOUTS = [  # case, rows, microbatch, file, row: with layers of 23 November, slower on one GPU (`ALONE`), too
    ("0.6b:tp2", 72, 24, "2x-nvidia-h200/2026-11-23/train-0.6b-tp2.json", 0),
    ("0.6b:cp2", 24, 6, "2x-nvidia-h200/2026-11-23/train-0.6b.json", 3),
    ("0.6b:dp2" + SHARDED, 24, 6, "2x-nvidia-h200/2026-11-23/train-0.6b.json", 5),
    ("4b:tp2", 24, 4, "2x-nvidia-h200/2026-11-23/train-4b.json", 1),
    ("4b:tp4", 24, 6, "4x-nvidia-h200/2026-11-22/train-4b.json", 0),
]


def row_of(file: str, row: int) -> dict[str, Any]:
    """Returns a row of a file's `rows`, or of the list behind a `#`."""
    name, _, part = file.partition("#")
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())[part or "rows"][row]
    return found


def seconds_of(file: str, row: int) -> float:
    values = row_of(file, row)
    return float(values["step_ms"] / 1000 if "step_ms" in values else values.get("ours_s") or values["median_s"])


def sft_step(case: str, rows: int, length: int, micro: int) -> float:
    config, model = bench_config(case, rows, length, micro)
    batch = Rows([length] * rows, rows * (length - 1))
    return step_seconds(config, run_times(config, RunPlan.of(config), model, H200, batch))


def grpo(monkeypatch: pytest.MonkeyPatch, model: str, *sizes: int, keys: dict[str, Any] = OLDER) -> tuple[Config, Rows]:
    """`sizes`: sequences, tokens of a completion, sequences of a microbatch, and tokens of a prompt, 120 if left out."""
    monkeypatch.setattr(workloads, "gpus", lambda: [Gpu("GPU-0", "NVIDIA H200", 143771, "580", (9, 0))])
    sequences, completion, micro, prompt = (*sizes, 120)[:4]
    case = rollout_case("", model, str(sequences), completion, micro=micro, tiny=False, kv_share=0.4, prompt=prompt)
    config = Config.model_validate(grpo_config(case, Path("m"))).with_keys(keys)
    return config, generated_rows(config, [case.prompt])


def grpo_step(monkeypatch: pytest.MonkeyPatch, model: str, *sizes: int, keys: dict[str, Any] = OLDER) -> dict[str, float]:
    """Returns the seconds of each phase and of the `step`."""
    config, rows = grpo(monkeypatch, model, *sizes, keys=keys)
    shape = workloads.SHAPES[workloads.MODELS[model]].config
    times = run_times(config, RunPlan.of(config), shape, H200, rows)
    assert not any(time.unknown for time in times if time.phase != "train_step" or sizes[2] > 1)
    return {time.phase: time.seconds for time in times} | {"step": step_seconds(config, times)}


def check(name: str, predicted: float, measured: float) -> None:
    """Checks a row of the table in docs/gpu.md."""
    assert predicted == pytest.approx(measured, rel=0.2)
    row = f"| {name} | {predicted:.3g} | {measured:.3g} | {predicted / measured:.2f} |"
    assert row in (ROOT / "docs" / "gpu.md").read_text(), row


@pytest.mark.parametrize(("run", "file", "row"), GENERATION)
def test_rates_of_engines_are_those_of_their_runs(run: Any, file: str, row: int, monkeypatch: Any) -> None:
    predicted = grpo_step(monkeypatch, *run, 1)["generate"]
    assert predicted == pytest.approx(seconds_of(file, row), rel=0.06)


@pytest.mark.parametrize(("model", "count", "file", "row"), FITTED)
def test_rates_of_our_kernels_are_those_of_their_runs(model: str, count: int, file: str, row: int, monkeypatch: Any) -> None:
    predicted = grpo_step(monkeypatch, model, count, 384, 1, keys=NOW)["generate"]
    assert predicted == pytest.approx(row_of(file, row)["whole_s"], rel=0.07)


@pytest.mark.parametrize(("sequences", "row"), [(64, 1), (512, 0)])
def test_generation_of_another_model_takes_as_long_as_predicted(sequences: int, row: int, monkeypatch: Any) -> None:
    predicted = grpo_step(monkeypatch, "4b", sequences, 384, 1, keys=NOW)["generate"]
    check(f"Generation, 4B, {sequences} x (120 + 384)", predicted, row_of(f"{DECODING}#alone", row)["whole_s"])


def test_overhead_is_that_of_the_run_that_it_was_fitted_to(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = json.loads((RESULTS / "1x-nvidia-h200/2026-11-28/fsdp.json").read_text())["grpo"]["megatron"]
    predicted = grpo_step(monkeypatch, "0.6b", 128, 256, 16)
    for phase, key in (("generate", "generate_s"), ("train_step", "train_step_s"), ("step", "median_s")):
        assert predicted[phase] == pytest.approx(measured[key], rel=0.1)


@pytest.mark.parametrize(("name", "run", "file", "row"), SFT)
def test_steps_of_sft_take_as_long_as_predicted(name: str, run: Any, file: str, row: int) -> None:
    if name:
        check(name if name.startswith("...") else f"SFT, {name}", sft_step(*run), seconds_of(file, row))
    else:
        assert sft_step(*run) == pytest.approx(seconds_of(file, row), rel=0.06)


@pytest.mark.parametrize(("name", "keys", "run", "file", "row"), GRPO)
def test_steps_of_grpo_last_as_predicted(name: str, keys: Any, run: Any, file: str, row: int, monkeypatch: Any) -> None:
    check(f"GRPO, {name}", grpo_step(monkeypatch, *run, keys=keys)["step"], seconds_of(file, row))


def test_phases_take_as_long_as_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, run = {"policy.worker": "dagrl:MegatronWorker"}, row_of(PEERS, 4)
    predicted = grpo_step(monkeypatch, "0.6b", 512, 256, 16, keys=keys)
    check("GRPO, 0.6B, 512 x (120 + 256)", predicted["step"], run["median_s"])
    for phase in ("generate", "train_step"):
        check(f"... `{phase}`", predicted[phase], run[f"timing_s/{phase}"])


def test_a_run_with_lengths_that_differ_takes_as_long_as_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ["cluster.num_gpus=2", "policy.deterministic=true"]
    config, times = step_times(load_config("dagrl/bench/gpu/step.yaml", words), "H200")
    assert [time.phase for time in times] == ["generate", "reference_logprobs", "train_step", "refit", "overhead"]
    result = json.loads((RESULTS / "2x-nvidia-h200/2026-11-28/third-form.json").read_text())
    name = "GRPO, 0.6B, 256 x (120 + 1 to 1,024), reference policy, two GPUs"
    check(name, step_seconds(config, times), result["step"]["after"][0]["median_s"])


WIDE = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
FOUR = [f"policy.random_init.hf_config.{name}={size}" for name, size in WIDE.items()]
FOUR += ["policy.megatron_cfg.tensor_model_parallel_size=2", "policy.generation.vllm_cfg.data_parallel_size=2"]


IN_FLIGHT = {2: "2x-nvidia-h200/2026-11-22/step-qwen3-0.6b.json", 4: "4x-nvidia-h200/2026-11-22/compare-qwen3-4b.json"}


@pytest.mark.parametrize(("gpus", "age", "row"), [(2, 1, 2), (2, 2, 3), (2, 4, 4), (4, 2, 3)])
def test_updates_in_flight_let_batches_overlap_as_predicted(gpus: int, age: int, row: int, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    keys = FOUR if gpus == 4 else []
    sizes = [f"cluster.num_gpus={gpus}", "grpo.num_prompts_per_step=16", "policy.train_global_batch_size=128"]
    ahead = f"grpo.async_grpo={{enabled: true, in_flight_weight_updates: true, max_trajectory_age_steps: {age}}}"
    words = [*sizes, "data.task_args.count=16", "policy.deterministic=true", *keys, ahead]
    config, times = step_times(load_config("dagrl/bench/gpu/step.yaml", words), "H200")
    name = f"GRPO, {'4B' if keys else '0.6B'}, 128 x (120 + 1 to 1,024), in flight, age {age}, {gpus} GPUs"
    check(name, step_seconds(config, times), row_of(IN_FLIGHT[gpus], row)["step_s"])


@pytest.mark.parametrize(("case", "rows", "micro", "file", "row"), LAYOUTS)
def test_layouts_speed_up_tokens_as_predicted(case: str, rows: int, micro: int, file: str, row: int) -> None:
    model = case.partition(":")[0]
    alone, of_alone = ALONE[model]
    predicted = sft_step(case, rows, 2048, micro) / rows / (sft_step(f"{model}:dp1", 24, 2048, alone) / 24)
    assert predicted == pytest.approx(seconds_of(file, row) / rows / (seconds_of(of_alone, 0) / 24), rel=0.15)


@pytest.mark.parametrize(("case", "gpus"), [("4B TP1->TP1", 2), ("30B EP2->TP2", 4)])
def test_refits_take_as_long_as_predicted(case: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads((RESULTS / f"{gpus}x-nvidia-h200/2026-11-26/refit.json").read_text())["cases"]
    found = next(row for row in rows if (row["name"], row["method"], row["dtype"]) == (case, "dagrl", "bf16"))
    config, _ = grpo(monkeypatch, "4b", 8, 256, 4)
    config = config.with_keys({"policy.generation.colocated.enabled": False})
    model = Decoder.of(workloads.SHAPES["qwen3-4b"].config)
    predicted = step_time.refit_time(config, RunPlan.of(config), model, H200, found["bytes_into_rank"] / 2)
    assert sum(predicted.values()) == pytest.approx(found["median_s"], rel=0.2)


def test_packed_rows_with_enough_work_take_cudnn() -> None:
    assert step_time.LEAST_WORK == cudnn_attention.LEAST_WORK


def test_engine_steps_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a loop over engine steps, with more sequences than slots."""
    config, rows = grpo(monkeypatch, "0.6b", 16, 64, 2)
    config = config.with_keys({"policy.generation.vllm_cfg.max_num_seqs": 3, "policy.generation.max_new_tokens": 64})
    rows = replace(rows, completions=[1 + number**2 % 23 for number in range(16)], lengths=[40] * 16)
    model = Decoder.of(workloads.SHAPES["qwen3-0.6b"].config)
    prompt = (rows.tokens - sum(rows.completions)) / 16
    waiting, running, seconds, steps, most = list(rows.completions), list[list[float]](), 0.0, 0, 0.0
    while waiting or running:
        while waiting and len(running) < 3:
            running.append([waiting.pop(0), prompt])
        tokens = sum(context + 0.5 for _, context in running)
        read = 2 * model.weights + tokens / 0.98 * 2 * 2 * 28 * 1024 + len(running) * 160 * 151936
        seconds, steps = seconds + 28 * 51e-6 + read / H200.memory, steps + 1
        most = max(most, tokens + 0.5 * len(running) - prompt * (len(running) - 1))  # samples share their prompt
        running = [[left - 1, context + 1] for left, context in running if left > 1]
    parts, about, cached = step_time.generate_time(config, model, H200, rows)
    assert parts["decoding"] == pytest.approx(seconds, rel=1e-6) and about.endswith(f" in {steps} engine steps")
    assert cached == pytest.approx(most * 2 * 2 * 28 * 1024)
    for room, reasons in ((0.99, ("sequences wait for KV cache: not counted",)), (1, ())):
        memory = [RoleMemory("generation", {"KV cache": room * cached}, 0)]
        times = run_times(config, RunPlan.of(config), workloads.SHAPES["qwen3-0.6b"].config, H200, rows, memory)
        assert times[0].phase == "generate" and times[0].unknown == reasons


def test_completions_have_their_mean_and_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each token were the last one with the same probability: exponential, cut off."""
    config, _ = grpo(monkeypatch, "0.6b", 2048, 128, 16)
    config = config.with_keys({"policy.generation.max_new_tokens": 128})
    lengths = generated_rows(config, [120], 64).completions
    assert sum(lengths) / 2048 == pytest.approx(64 * (1 - math.exp(-2)), rel=0.02)
    assert sum(length == 128 for length in lengths) / 2048 == pytest.approx(math.exp(-2), rel=0.03)
    assert set(generated_rows(config, [120]).completions) == {128}


def test_shared_prompts_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = grpo(monkeypatch, "0.6b", 128, 64, 16)
    rows = generated_rows(config, [1000])
    assert rows.saved == pytest.approx(128 * 1000 * 7 / 8 / (128 * 1064))
    flash = config.with_keys({"policy.sequence_packing.train_mb_tokens": 65536}).policy
    cudnn, model = flash.model_copy(update={"deterministic": False}), Decoder.of(workloads.SHAPES["qwen3-4b"].config)
    runs = (cudnn, rows.saved), (cudnn, 0.0), (flash, 0.0)
    times = [train_time(policy, model, H200, replace(rows, saved=saved))[0] for policy, saved in runs]
    shared, whole, by_flash = (time["attention"] for time in times)
    assert shared == by_flash > whole  # FlashAttention 2 computes shared prefixes
    count, width = step_time.split_rows(config.policy, rows, trains=True)
    assert 16 * 1000 + 128 * 64 <= count * width <= 1.3 * (16 * 1000 + 128 * 64)


@pytest.mark.parametrize(
    ("key", "value", "phase", "reason"),
    [
        ("worker", "mine:Worker", "train_step", "mine:Worker: a worker of your own"),
        ("peft.enabled", True, "train_step", "adapters: counted as all weights"),
        ("generation.vllm_cfg.enforce_eager", True, "generate", "an engine without CUDA graphs: not measured"),
        ("generation.vllm_cfg.precision", "fp8", "generate", "an engine in FP8: not measured"),
        ("generation.worker", "mine:Engine", "generate", "mine:Engine: a worker of your own"),
    ],
)
def test_unknown_parts_are_no_prediction(key: str, value: Any, phase: str, reason: str, monkeypatch: Any) -> None:
    config, rows = grpo(monkeypatch, "0.6b", 128, 64, 16)
    config = config.with_keys({f"policy.{key}": value})
    times = run_times(config, RunPlan.of(config), workloads.SHAPES["qwen3-0.6b"].config, H200, rows)
    assert {time.phase: time.unknown for time in times if time.unknown} == {phase: (reason,)}


def test_adapters_in_the_engine_are_no_prediction_and_their_reference_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    config, rows = grpo(monkeypatch, "0.6b", 128, 64, 16)
    keys = {"policy.peft.enabled": True, "policy.peft.refit": "adapters", "loss_fn.reference_policy_kl_penalty": 0.1}
    config, model = config.with_keys(keys), workloads.SHAPES["qwen3-0.6b"].config
    times = {time.phase: time for time in run_times(config, RunPlan.of(config), model, H200, rows)}
    assert times["generate"].unknown == ("adapters in the engine: not measured",)
    assert "weights to the GPU" not in times["reference_logprobs"].parts


def test_steps_that_wait_for_launches_are_no_prediction() -> None:
    """A microbatch of 0.6B with 256 tokens takes as long as its launches, whose time is that of another host."""
    config, model = bench_config("0.6b:dp1", 16, 256, 1)
    (step, _) = run_times(config, RunPlan.of(config), model, H200, Rows([256] * 16, 16 * 255))
    assert step.unknown == ("launches take longer than kernels: how long depends on the host",)
    assert step.parts["waiting for launches"] == pytest.approx(16 * 28 * 4.5e-3, rel=0.3)


def test_engines_of_asynchronous_runs_generate_at_the_same_time() -> None:
    config, _ = bench_config("0.6b:dp1", 1, 8, 1)
    times = [step_time.PhaseTime(name, {"": value}) for name, value in (("generate", 3), ("train_step", 2), ("refit", 1))]
    ahead = config.with_keys({"grpo.async_grpo.enabled": True})
    assert (step_seconds(config, times), step_seconds(ahead, times)) == (6, 4)


def test_inspect_prints_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    example = ["inspect", "examples/grpo_gpu.yaml", "--time"]
    assert main([*example, "H200"]) == 0
    text = capsys.readouterr().out
    assert "128 completions of 4 tokens in 4 engine steps" in text and text.splitlines()[-1].startswith("step  ")
    assert main([*example, "H200", "policy.random_init.hf_config.hidden_size=4096"]) == 0
    assert main([*example, "H200", "policy.random_init.hf_config.hidden_size=16384"]) == 2
    assert re.search(r"train workers need \d+.\d GiB of a GPU before any batch", capsys.readouterr().err)
    assert main([*example, "A10"]) == 2
    assert "--time A10: its rates are not known; expected: H200, H100" in capsys.readouterr().err


def test_recomputation_takes_another_forward_pass() -> None:
    config, model = bench_config("4b:dp1" + FSDP, 1, 16384, 1)
    rows, keys = Rows([16384], 16383), {"policy.fsdp_cfg.activation_checkpointing": "full"}
    whole, again = (train_time(one.policy, Decoder.of(model), H200, rows)[0] for one in (config, config.with_keys(keys)))
    assert again["attention"] == pytest.approx(whole["attention"] * 4 / 3)
