"""A train worker's throughput: model FLOPs by Megatron's formula, peak FLOP/s of GPUs, and the metrics of a step.

The formula is `num_floating_point_operations` of Megatron-LM (megatron/training/training.py): three times the forward matrix
products of projections, MLPs (those of a token's experts), causal attention and the output layer. Norms and recomputation do
not count. Attention uses each sequence's own length, so padding and packing change nothing. Importing this needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from dagrl.workers.megatron.architecture import Architecture

if TYPE_CHECKING:
    import torch

PASSES = 3  # the backward pass has two products for each forward product
OPERATIONS = 2  # a multiplication and an addition

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


def token_flops(model: Architecture) -> float:
    """Returns the forward FLOPs of a token, without attention to earlier tokens."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = model.hidden * (queries + 2 * keys) + queries * model.hidden
    experts = sum(model.moe_layers) if model.experts else 0
    dense = 3 * model.hidden * model.ffn  # gate, up and down
    routed = 3 * model.hidden * (model.expert_ffn * model.experts_per_token + model.shared_ffn)
    layers = model.layers * attention + (model.layers - experts) * dense + experts * routed
    return OPERATIONS * float(layers + model.hidden * (1 if model.scalar else model.vocabulary))


def sequence_flops(model: Architecture, length: int) -> float:
    """Returns the forward FLOPs of a sequence: its tokens, and causal attention, which is half of the square."""
    attention = OPERATIONS * 2 * model.layers * model.heads * model.head_dim * length * length / 2
    return length * token_flops(model) + attention


def step_tflop(model: Architecture, lengths: Any) -> float:
    """Returns the TFLOPs of a training step on sequences of these lengths."""
    return PASSES * sum(sequence_flops(model, int(length)) for length in lengths) / 1e12


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Returns a device's peak TFLOP/s in bfloat16. None if unknown; there is no MFU then."""
    if precision != "bfloat16":
        return None
    return next((peak for name, peak in GPU_TFLOPS if _names(name, device_name)), None)


def _names(name: str, device_name: str) -> bool:
    """Whether whole words match: `H20` does not match an `H200`."""
    words = device_name.replace("-", " ").split()
    parts = name.split()
    return any(words[start : start + len(parts)] == parts for start in range(len(words)))


def throughput_metrics(
    model: Architecture,
    policy: PolicyConfig,
    context: WorkerContext,
    device: torch.device,
    *,
    seconds: float,
    lengths: Any,
    saved: Any,
) -> StepMetrics:
    """Returns this worker's equal share of a shard's FLOPs and tokens of a step, its time and memory.

    Tokens are those of all rows, `lengths`; the FLOPs are without those of the prefixes of lengths `saved`.
    """
    import torch

    part = context.layout.dp / context.layout.world_size
    own = f"{RANK}{context.rank}/"
    tflop = step_tflop(model, lengths) - step_tflop(model, saved)
    counts = {TRAIN_TFLOP: part * tflop, TRAIN_TOKENS: part * float(lengths.sum())}
    sums = {**counts, **{own + name: value for name, value in counts.items()}, TRAIN_RANKS: 1.0}
    maxima = {TRAIN_SECONDS: seconds, f"{own}train_seconds": seconds}
    on_gpu = device.type == "cuda"
    if on_gpu:
        memory = torch.cuda.max_memory_allocated(device) / 2**30
        maxima |= {PEAK_MEMORY: memory, f"{own}peak_memory_gib": memory}
    name = torch.cuda.get_device_name(device) if on_gpu else ""
    peak = peak_tflops(name, policy.precision)
    return StepMetrics(sums, maxima, {} if peak is None else {PEAK_TFLOPS: peak})
