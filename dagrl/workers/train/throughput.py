"""A train worker's throughput: peak FLOP/s of GPUs, and the metrics of a step. Importing this needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    import torch

GPU_TFLOPS = (
    # Dense matrix products in half precision, without sparsity, as NVIDIA's data sheets give them.
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("GH200", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("B300", 2250.0),
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("A10", 125.0),
    ("V100", 125.0),
)


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Returns a device's peak TFLOP/s in bfloat16. None if unknown; there is no MFU then."""
    if precision != "bfloat16":
        return None
    words = f" {device_name.replace('-', ' ')} "  # whole ones, as `H20` is no `H200`
    return next((peak for name, peak in GPU_TFLOPS if f" {name} " in words), None)


def throughput_metrics(
    policy: PolicyConfig, context: WorkerContext, device: torch.device, *, tflop: float, tokens: int, seconds: float
) -> StepMetrics:
    """Returns this worker's equal share of a shard's `tflop` and `tokens` of a step, its time and memory."""
    import torch

    part = context.layout.dp / context.layout.world_size
    own = f"{RANK}{context.rank}/"
    sums = {TRAIN_TFLOP: part * tflop, TRAIN_TOKENS: part * tokens, TRAIN_RANKS: 1.0}
    maxima = {TRAIN_SECONDS: seconds, f"{own}train_seconds": seconds}
    on_gpu = device.type == "cuda"
    if on_gpu:
        memory = torch.cuda.max_memory_allocated(device) / 2**30
        maxima |= {PEAK_MEMORY: memory, f"{own}peak_memory_gib": memory}
    name = torch.cuda.get_device_name(device) if on_gpu else ""
    peak = peak_tflops(name, policy.precision)
    return StepMetrics(sums, maxima, {} if peak is None else {PEAK_TFLOPS: peak})
