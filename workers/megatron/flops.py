"""Model FLOPs of a training step by Megatron's formula, and what a GPU could do at most: throughput and MFU come from both.

The formula is `num_floating_point_operations` of Megatron-LM (megatron/training/training.py): matrix products of
projections, MLPs (of the experts that a token goes to), causal attention and the output layer, three times those of the
forward pass; neither norms nor recomputation count. Attention counts each sequence by its own length, so padding and
packing change nothing. Pure; needs no torch.
"""

from __future__ import annotations

from typing import Any

from workers.megatron.architecture import Architecture

PASSES = 3  # the backward pass makes two products for each of the forward pass
OPERATIONS = 2  # a multiplication and an addition

PEAK_TFLOPS = (
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
    """Forward FLOPs of a token, save what attention does with the tokens before it."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = model.hidden * (queries + 2 * keys) + queries * model.hidden
    experts = sum(model.moe_layers) if model.experts else 0
    dense = 3 * model.hidden * model.ffn  # gate, up and down
    routed = 3 * model.hidden * model.expert_ffn * model.experts_per_token
    layers = model.layers * attention + (model.layers - experts) * dense + experts * routed
    return OPERATIONS * float(layers + model.hidden * model.vocabulary)


def sequence_flops(model: Architecture, length: int) -> float:
    """Forward FLOPs of a sequence: its tokens, and scores and sums of causal attention, half of the square."""
    attention = OPERATIONS * 2 * model.layers * model.heads * model.head_dim * length * length / 2
    return length * token_flops(model) + attention


def step_tflop(model: Architecture, lengths: Any) -> float:
    """10^12 FLOPs of a training step on sequences of these lengths."""
    return PASSES * sum(sequence_flops(model, int(length)) for length in lengths) / 1e12


def peak_tflops(device_name: str, precision: str, override: float | None) -> float | None:
    """10^12 FLOP/s that a device could do in bfloat16; None where that is not known, so that no MFU can be given."""
    if override is not None:
        return override
    if precision != "bfloat16":
        return None
    return next((peak for name, peak in PEAK_TFLOPS if _names(name, device_name)), None)


def _names(name: str, device_name: str) -> bool:
    """`H20` does not name an `H200`."""
    words = device_name.replace("-", " ").split()
    parts = name.split()
    return any(words[start : start + len(parts)] == parts for start in range(len(words)))
