"""Blockwise FP8: 128x128 blocks of e4m3 with one float32 scale each, the format of DeepSeek-V3's checkpoints and of vLLM.

`weight ~= quantized * scale`; the scale is the block's largest magnitude (at least 1e-4) divided by 448. The arithmetic
follows vLLM's `per_block_cast_to_fp8` (vllm/utils/deep_gemm.py) operation by operation, so the bytes are equal. On GPUs
`kernels/quantize_kernel.py` does the same operations for a whole bucket in one launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from dagrl.refit.slices import Box, Scales, WeightSlice

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128
FP8 = "float8_e4m3fn"
LARGEST = 448.0  # of e4m3
SMALLEST_PEAK = 1e-4
SCALE_SUFFIX = "_scale_inv"
"""A weight's name in a checkpoint with this suffix is that of its scales."""


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a tensor's scales: its last two dimensions in blocks."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def in_blocks(box: Box) -> Box:
    """Returns a box whose edges are between blocks, counted in blocks."""
    return (*box[:-2], *((start // BLOCK, -(-stop // BLOCK)) for start, stop in box[-2:]))


def with_scales(slices: Iterable[WeightSlice]) -> Iterator[WeightSlice]:
    """Yields the slices, those of FP8 weights with their scales, which checkpoints have as parameters of their own."""
    slices = list(slices)
    scales = {(weight.name, weight.box): weight for weight in slices if weight.name.endswith(SCALE_SUFFIX)}
    keys = {weight: (f"{weight.name}{SCALE_SUFFIX}", in_blocks(weight.box)) for weight in slices if weight.dtype == FP8}
    used = set(keys.values())
    for weight in slices:
        own = scales.get(keys[weight]) if weight in keys else None
        if own is not None:
            yield replace(weight, scales=Scales(own.tensor, own.local))
        elif (weight.name, weight.box) not in used:
            yield weight


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `weight` [..., rows, columns] as e4m3, and float32 scales [..., ceil(rows / 128), ceil(columns / 128)].

    The last blocks of rows and columns may be smaller.
    """
    import torch

    *lead, rows, columns = weight.shape
    scales = scale_shape(tuple(weight.shape))
    padded = weight
    if rows % BLOCK or columns % BLOCK:
        padded = weight.new_zeros(*lead, scales[-2] * BLOCK, scales[-1] * BLOCK)
        padded[..., :rows, :columns] = weight
    blocks = padded.reshape(*lead, scales[-2], BLOCK, scales[-1], BLOCK)
    peak = blocks.abs().float().amax(dim=(-3, -1), keepdim=True).clamp(SMALLEST_PEAK)
    scale = peak / LARGEST
    quantized = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn).view(padded.shape)[..., :rows, :columns]
    return quantized, scale.view(scales)
