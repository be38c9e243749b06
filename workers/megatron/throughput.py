"""A worker's share of a train step's throughput, MFU and memory. `dagrl.telemetry.metrics` computes the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dagrl.config import PolicyConfig
from dagrl.runtime.worker import WorkerContext
from dagrl.telemetry.metrics import (
    PEAK_MEMORY,
    PEAK_TFLOPS,
    RANK,
    TRAIN_RANKS,
    TRAIN_SECONDS,
    TRAIN_TFLOP,
    TRAIN_TOKENS,
    StepMetrics,
)
from dagrl.workers.megatron.flops import peak_tflops, step_tflop

if TYPE_CHECKING:
    from dagrl.workers.megatron.accumulation import AccumulatedParts
    from dagrl.workers.megatron.architecture import Architecture


def throughput_metrics(
    model: Architecture,
    policy: PolicyConfig,
    context: WorkerContext,
    device: torch.device,
    step: AccumulatedParts,
) -> StepMetrics:
    """Returns this worker's equal share of a shard's FLOPs and tokens of a step, its time and memory.

    Tokens are those of all rows; the FLOPs are without those of saved prefixes.
    """
    part = context.layout.dp / context.layout.world_size
    own = f"{RANK}{context.rank}/"
    tflop = step_tflop(model, step.lengths) - step_tflop(model, step.saved)
    counts = {TRAIN_TFLOP: part * tflop, TRAIN_TOKENS: part * float(step.lengths.sum())}
    sums = {**counts, **{own + name: value for name, value in counts.items()}, TRAIN_RANKS: 1.0}
    maxima = {TRAIN_SECONDS: step.seconds, f"{own}train_seconds": step.seconds}
    on_gpu = device.type == "cuda"
    if on_gpu:
        memory = torch.cuda.max_memory_allocated(device) / 2**30
        maxima |= {PEAK_MEMORY: memory, f"{own}peak_memory_gib": memory}
    name = torch.cuda.get_device_name(device) if on_gpu else ""
    peak = peak_tflops(name, policy.precision, policy.megatron_cfg.peak_tflops)
    return StepMetrics(sums, maxima, {} if peak is None else {PEAK_TFLOPS: peak})
