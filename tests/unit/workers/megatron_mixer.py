"""Megatron's Mamba mixer computes transformers' results when our slices copy the weights; see megatron_forward.py.

Megatron computes it on GPUs only, but names its parts when it writes checkpoints (`in_proj.weight.z`, `conv1d.bias.x`). Here
the named parts run through Mamba-2's recurrence (Dao and Gu, 2024), token by token.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families.megatron import MegatronModules
from dagrl.workers.megatron.weights import megatron_weight_slices
from tests.families import FAMILIES, Hf, random_model
from tests.unit.refit.weight_reference import Weights, filled
from tests.unit.workers.megatron_models import build_chunks, rank_of, tensors_of
from tests.unit.workers.megatron_shapes import boxes_of, do_without_gpus, fill

CASES = tuple({**FAMILIES["nemotron_h"], **sizes} for sizes in ({}, {"n_groups": 1}))


def named_parts(config: Hf, weights: Weights) -> Weights:
    """Returns the parts of Megatron's first layer, filled by our slices, by Megatron's names."""
    with rank_of(ParallelLayout(), 0):
        chunks = build_chunks(config, ParallelLayout(), MegatronModules())
        fill(chunks, filled(weights, megatron_weight_slices(config, ParallelLayout(), 0), tensors_of(chunks[""])))
        prefix = "decoder.layers.0.mixer."
        return {box.key.removeprefix(prefix): box.data for box in boxes_of(chunks[""]) if box.key.startswith(prefix)}


def mix(part: Weights, config: Hf, hidden: Tensor, time_step_min: float) -> Tensor:
    """Computes `[seq, hidden]` of one sequence, one token at a time."""
    heads, size, groups, state = (config[key] for key in ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"))
    z, x, b, c, dt = (hidden @ part[f"in_proj.weight.{name}"].T for name in ("z", "x", "B", "C", "dt"))
    x, b, c = (
        silu(convolve(values, part[f"conv1d.weight.{name}"], part[f"conv1d.bias.{name}"]))
        for name, values in (("x", x), ("B", b), ("C", c))
    )
    steps = softplus(dt + part["dt_bias"]).clamp(min=time_step_min)  # [seq, heads]
    memory, out = torch.zeros(heads, size, state), []
    for at in range(len(hidden)):
        now = x[at].view(heads, size)
        key, query = (one[at].view(groups, state).repeat_interleave(heads // groups, 0) for one in (b, c))
        decay = torch.exp(-torch.exp(part["A_log"]) * steps[at])
        memory = decay[:, None, None] * memory + (steps[at][:, None] * now)[:, :, None] * key[:, None, :]
        out.append((memory @ query[:, :, None])[:, :, 0] + part["D"][:, None] * now)
    gated = torch.stack(out).flatten(1) * silu(z)
    grouped = gated.view(len(hidden), groups, -1)
    scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + config["layer_norm_epsilon"])
    return (grouped * scale).flatten(1) * part["norm.weight"] @ part["out_proj.weight"].T


def convolve(values: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """Convolves each column with its own causal kernel."""
    past = kernel.shape[-1] - 1
    return conv1d(values.T[None], kernel, bias, padding=past, groups=len(kernel))[0, :, : len(values)].T


def check(config: Hf) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model, weights = random_model(config, Path(directory))
    hidden = torch.randn(7, config["hidden_size"])
    mixer = model.model.layers[0].mixer
    with torch.no_grad():
        expected = mixer(hidden[None])[0]
        found = mix(named_parts(config, weights), config, hidden, model.config.time_step_min)
    difference = float((found - expected).abs().max())
    assert difference < 1e-4 < 0.01 * float(expected.std()), (difference, float(expected.std()))
    print("mixer agrees", difference, flush=True)


def check_all() -> None:
    """Runs every case and prints a line for each."""
    do_without_gpus()
    for config in CASES:
        check(config)
