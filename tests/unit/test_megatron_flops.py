"""Model FLOPs against torch's own count of a Hugging Face model's forward pass, and the figures made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dagrl.metrics import (
    PEAK_TFLOPS,
    TRAIN_MFU,
    TRAIN_RANKS,
    TRAIN_SECONDS,
    TRAIN_TFLOP,
    TRAIN_TFLOPS_PER_GPU,
    TRAIN_TOKENS,
    TRAIN_TOKENS_PER_SEC_PER_GPU,
    StepMetrics,
    merge_step_metrics,
)
from workers.megatron.architecture import read_architecture
from workers.megatron.flops import PASSES, peak_tflops, sequence_flops, step_tflop, token_flops

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
LENGTH = 20


@pytest.mark.parametrize(
    "extra", [{"model_type": "qwen3"}, {"model_type": "qwen3_moe", **EXPERTS}], ids=["grouped-queries", "experts"]
)
def test_forward_flops_are_those_that_torch_counts(extra: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**SIZES, **extra}
    config = AutoConfig.for_model(**settings, experts_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(0, 96, (1, LENGTH)))
    architecture = read_architecture({**settings, "rms_norm_eps": 1e-6})
    attention = sequence_flops(architecture, LENGTH) - LENGTH * token_flops(architecture)
    counted = float(counter.get_total_flops())
    routers = 2 * LENGTH * settings["hidden_size"] * settings.get("num_experts", 0) * sum(architecture.moe_layers)
    whole_square = LENGTH * token_flops(architecture) + 2 * attention  # torch counts what a causal mask hides
    assert counted - routers == pytest.approx(whole_square, rel=1e-9)  # Megatron's formula leaves routers out
    step = step_tflop(architecture, [LENGTH, LENGTH, 0])
    assert step * 1e12 == pytest.approx(PASSES * 2 * sequence_flops(architecture, LENGTH))


def test_a_known_model_costs_what_its_parameters_say() -> None:
    """Six FLOPs a parameter and token, for Qwen3-4B's 4.02 billion (embedding and output layer are one)."""
    from bench.models import SHAPES

    architecture = read_architecture(SHAPES["qwen3-4b"].config)
    assert PASSES * token_flops(architecture) == pytest.approx(6 * 4.02e9, rel=0.002)


def test_figures_of_a_step_over_workers() -> None:
    def worker(rank: int, seconds: float) -> StepMetrics:
        sums = {TRAIN_TFLOP: 30.0, TRAIN_TOKENS: 500.0, TRAIN_RANKS: 1.0}
        maxima = {TRAIN_SECONDS: seconds, f"perf/rank_{rank}/train_seconds": seconds}
        return StepMetrics(sums, maxima, {PEAK_TFLOPS: 100.0})

    found = merge_step_metrics([worker(0, 0.25), worker(1, 0.5)]).flat()
    assert found[TRAIN_TFLOPS_PER_GPU] == 60.0 and found[TRAIN_MFU] == 0.6
    assert found[TRAIN_TOKENS_PER_SEC_PER_GPU] == 1000.0
    assert found["perf/rank_0/train_seconds"] == 0.25
    assert not {TRAIN_TFLOP, TRAIN_TOKENS, TRAIN_RANKS, PEAK_TFLOPS} & set(found)


@pytest.mark.parametrize(
    ("device", "precision", "override", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", None, 989.0),
        ("NVIDIA H100 PCIe", "bfloat16", None, 756.0),
        ("NVIDIA H200", "bfloat16", None, 989.0),
        ("NVIDIA H20", "bfloat16", None, 148.0),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", None, 312.0),
        ("NVIDIA H200", "float32", None, None),
        ("", "bfloat16", None, None),
        ("", "float32", 2.5, 2.5),
    ],
)
def test_peaks_by_device_name(device: str, precision: str, override: float | None, peak: float | None) -> None:
    assert peak_tflops(device, precision, override) == peak
