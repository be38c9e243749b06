"""A model's FLOPs by Megatron's formula.

It is `num_floating_point_operations` of Megatron-LM (megatron/training/training.py): three times the forward matrix
products of projections, MLPs (those of a token's experts), causal attention and the output layer. Norms and recomputation do
not count. Attention uses each sequence's own length, so padding and packing change nothing. Importing this needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from dagrl.workers.megatron.architecture import Architecture

PASSES = 3  # the backward pass has two products for each forward product
OPERATIONS = 2  # a multiplication and an addition


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


def step_tflop(model: Architecture, lengths: Iterable[int]) -> float:
    """Returns the TFLOPs of a training step on sequences of these lengths."""
    return PASSES * sum(sequence_flops(model, int(length)) for length in lengths) / 1e12
