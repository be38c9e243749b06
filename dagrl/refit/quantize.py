"""Blockwise FP8: 128x128 blocks of e4m3 with one float32 scale each, as DeepSeek-V3's checkpoints and vLLM hold them.

`weight ~= quantized * scale`, the scale being the block's largest magnitude (at least 1e-4) over 448. The arithmetic is that
of vLLM's `per_block_cast_to_fp8` (vllm/utils/deep_gemm.py), operation by operation, so that bytes agree; on GPUs a kernel
(`quantize_kernel.py`) does the same operations, a whole bucket in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from dagrl.refit.quantize_kernel import BlockTable
    from dagrl.refit.slices import Box

BLOCK = 128
FP8 = "float8_e4m3fn"
LARGEST = 448.0  # of e4m3
SMALLEST_PEAK = 1e-4


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a tensor: its last two dimensions in blocks."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def in_blocks(box: Box) -> Box:
    """A box whose edges are edges of blocks, counted in blocks."""
    return (*box[:-2], *((start // BLOCK, -(-stop // BLOCK)) for start, stop in box[-2:]))


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [..., rows, columns] as e4m3 of the same shape, and its scales [..., rows / 128, columns / 128] in float32.

    Blocks at the lower and right end may be smaller.
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


class BlockQuantizer:
    """Quantizes the same tensors again and again: `parts` are (weight, where its FP8 goes, where its scales go).

    On GPUs `run` is one launch for each dtype of the weights, allocates nothing and does not wait, so that a CUDA graph can
    capture it. Memory is bound once: it must stay where it is.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        self._tables = _tables([part for part in parts if _has_kernel(part[0])])
        self._others = [part for part in parts if not _has_kernel(part[0])]

    def run(self, alone: bool = False) -> None:
        """Quantize all parts; on GPUs on the current stream. `alone` takes the whole GPU, as in `BatchedCopy.run`."""
        import torch

        for table in self._tables:
            table.launch(alone)
        for weight, place, scale_place in self._others:
            quantized, scales = quantize_blocks(weight)
            place.view(torch.uint8).copy_(quantized.view(torch.uint8))
            scale_place.copy_(scales)


def _has_kernel(weight: Tensor) -> bool:
    import torch

    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _tables(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[BlockTable]:
    """One table for each dtype."""
    if not parts:
        return []
    from dagrl.refit.quantize_kernel import BlockTable

    groups: dict[object, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for part in parts:
        groups.setdefault(part[0].dtype, []).append(part)
    return [BlockTable(some) for some in groups.values()]
