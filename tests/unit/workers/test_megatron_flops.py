"""Model FLOPs against torch's count of a Hugging Face model's forward pass, and the metrics derived from them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from dagrl.bench.models import SHAPES
from dagrl.config import PolicyConfig
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.worker import WorkerContext
from dagrl.telemetry import metrics
from dagrl.telemetry.metrics import StepMetrics, join_optimizer_steps, merge_step_metrics
from dagrl.workers.megatron.architecture import PASSES, read_architecture, sequence_flops, step_tflop, token_flops
from dagrl.workers.train.throughput import peak_tflops, throughput_metrics
from tests.families import FAMILIES

ODD = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 16}
DEEPSEEK = {"model_type": "deepseek_v3", "num_key_value_heads": 6, "head_dim": 8}
LENGTH = 20


@pytest.mark.parametrize(
    "keys",
    [*({"model_type": kind} for kind in ("qwen3", "qwen3_moe", "glm4_moe")), DEEPSEEK, {**DEEPSEEK, "q_lora_rank": None}],
    ids=["grouped-queries", "experts", "shared-experts", "latent", "latent, queries whole"],
)
def test_forward_flops_are_those_that_torch_counts(keys: dict[str, Any]) -> None:
    settings = {**FAMILIES[keys["model_type"]], **ODD, **keys}
    config = AutoConfig.for_model(**settings, experts_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(0, 300, (1, LENGTH)))
    architecture = read_architecture({**settings, "rms_norm_eps": 1e-6})
    attention = sequence_flops(architecture, LENGTH) - LENGTH * token_flops(architecture)
    counted = float(counter.get_total_flops())
    routers = 2 * LENGTH * settings["hidden_size"] * architecture.experts * sum(architecture.moe_layers)
    whole_square = LENGTH * token_flops(architecture) + 2 * attention  # torch counts what a causal mask hides
    assert counted - routers == pytest.approx(whole_square, rel=1e-9)  # Megatron's formula leaves routers out
    step = step_tflop(architecture, [LENGTH, LENGTH, 0])
    assert step * 1e12 == pytest.approx(PASSES * 2 * sequence_flops(architecture, LENGTH))


def test_a_known_model_costs_what_its_parameters_say() -> None:
    """Six FLOPs per parameter and token, for Qwen3-4B's 4.02 billion (with tied embeddings)."""
    architecture = read_architecture(SHAPES["qwen3-4b"].config)
    assert PASSES * token_flops(architecture) == pytest.approx(6 * 4.02e9, rel=0.002)


QWEN3 = read_architecture(FAMILIES["qwen3"])


def step_of(layout: ParallelLayout, seconds: list[float], lengths: list[list[int]]) -> StepMetrics:
    """Returns the reports of all workers of a layout; `lengths` are those of each shard's rows."""
    parts = [
        throughput_metrics(
            PolicyConfig(),
            WorkerContext("train", rank, layout, 0, 1.0),
            torch.device("cpu"),
            tflop=step_tflop(QWEN3, rows),
            tokens=sum(rows),
            seconds=seconds[rank],
        )
        for rank in range(layout.world_size)
        for rows in [lengths[layout.coordinates(rank).dp]]
    ]
    return merge_step_metrics(parts)


def test_metrics_of_a_step_over_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shards of two workers with different rows and one slow worker."""
    monkeypatch.setattr("dagrl.workers.train.throughput.peak_tflops", lambda *device: 1e-3)
    layout, lengths = ParallelLayout(dp=2, tp=2), [[10, 30], [20]]
    seconds = [0.25, 0.25, 0.25, 0.5]
    found = step_of(layout, seconds, lengths).flat()
    tflop = [step_tflop(QWEN3, rows) for rows in lengths]
    assert found[metrics.TRAIN_SECONDS] == 0.5
    assert found[metrics.TRAIN_TOKENS_PER_SEC_PER_GPU] == pytest.approx(60 / 0.5 / 4)
    assert found[metrics.TRAIN_TFLOPS_PER_GPU] == pytest.approx(sum(tflop) / 0.5 / 4)
    assert found[metrics.TRAIN_MFU] == pytest.approx(found[metrics.TRAIN_TFLOPS_PER_GPU] / 1e-3)
    for rank in range(4):
        assert found[f"perf/rank_{rank}/train_seconds"] == seconds[rank]
    assert {name for name in found if not name.startswith("perf/")} == set()


def test_without_a_known_peak_there_is_no_mfu() -> None:
    found = step_of(ParallelLayout(dp=2), [0.25, 0.5], [[10], [20]]).flat()
    assert found[metrics.TRAIN_TFLOPS_PER_GPU] > 0 and metrics.TRAIN_MFU not in found


def test_rates_cover_all_optimizer_steps() -> None:
    parts = [step_of(ParallelLayout(dp=2), [1.0, 2.0], rows) for rows in ([[10], [20]], [[30], [40]])]
    parts = [
        replace(part, sums={**part.sums, metrics.VALID_TOKENS: weight})
        for part, weight in zip(parts, (1.0, 9.0), strict=True)
    ]
    found = join_optimizer_steps(parts).flat()
    assert found["perf/rank_0/train_seconds"] == 2.0 and found["perf/rank_1/train_seconds"] == 4.0
    assert found[metrics.TRAIN_TOKENS_PER_SEC_PER_GPU] == pytest.approx(100 / 4 / 2)


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.0),
        ("NVIDIA H20", "bfloat16", 148.0),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA H200", "float32", None),
        ("", "bfloat16", None),
    ],
)
def test_peaks_by_device_name(device: str, precision: str, peak: float | None) -> None:
    assert peak_tflops(device, precision) == peak
