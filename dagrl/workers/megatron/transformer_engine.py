"""Attention of segments and products of FP8 matrices by Transformer Engine.

Parameters stay those of Megatron's local layers, so checkpoints, refits and adapters do not depend on it.
`dagrl.workers.megatron.kernels` decides what is used. Imported only where Transformer Engine is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformer_engine.pytorch import (
    DotProductAttention,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
)
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.cpp_extensions import general_gemm

from dagrl.config import Fp8Config
from dagrl.workers.megatron import attention
from dagrl.workers.megatron.float8 import MULTIPLE, Kept
from dagrl.workers.train.microbatches import Segments

LEAST_WORK = 1 << 29
"""Products of a query and a key, over all heads, from which on its attention is faster than FlashAttention 2 on an H200."""
LARGEST_HEAD = 128  # values of a head, for the backward pass
BLOCK = 128  # values with one scale in the recipe `blockwise`, along each dimension of a weight


def segment_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Computes attention within segments, as `attention.segment_attention`.

    Segments that share prefixes take FlashAttention 2, and so do heads that cuDNN does not take.
    """
    if segments.prefixes is not None or query.shape[-1] > LARGEST_HEAD or query.shape[-1] % 8:
        return attention.segment_attention(query, key, value, segments, scale)
    out: Tensor = _attention(*query.shape[1:], key.shape[1], scale)(
        query,
        key,
        value,
        attn_mask_type="padding_causal" if segments.key_order is None else "padding_causal_bottom_right",
        cu_seqlens_q=segments.query_starts,
        cu_seqlens_kv=segments.key_starts,
        max_seqlen_q=segments.longest_query,
        max_seqlen_kv=segments.longest_key,
        pad_between_seqs=False,
    )
    return out.view_as(query)


def faster_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Computes `segment_attention`, by FlashAttention 2 where that is faster."""
    work = query.shape[0] * query.shape[1] * segments.rounded_key
    chosen = segment_attention if work >= LEAST_WORK else attention.segment_attention
    return chosen(query, key, value, segments, scale)


@cache
def _attention(heads: int, size: int, kv_heads: int, scale: float) -> Any:
    """Returns the attention module of these sizes, which all layers share because it has no parameters."""
    return DotProductAttention(heads, size, kv_heads, qkv_format="thd", softmax_scale=scale)


class EngineProducts:
    """`float8.Products`: with one scale for each matrix, or for blocks of it.

    `blockwise`: 128 x 128 values of a weight, 128 values of a token, and 128 tokens' values of a column.
    """

    def __init__(self, settings: Fp8Config) -> None:
        self._blockwise = settings.fp8_recipe == "blockwise"
        self.multiple = BLOCK if self._blockwise else MULTIPLE
        self._gradients = DType.kFloat8E5M2 if settings.fp8 == "hybrid" else DType.kFloat8E4M3

    def output(self, states: Tensor, weight: Tensor, trained: bool) -> tuple[Tensor, Kept]:
        """See `Products`."""
        inputs = self._quantize(self._padded(states), DType.kFloat8E4M3, columns=trained)
        weights = self._quantize(weight, DType.kFloat8E4M3, dimensions=2)
        output: Tensor = general_gemm(weights, inputs, out_dtype=states.dtype)[0][: len(states)]
        if not trained:
            return output, Kept(())
        inputs.update_usage(rowwise_usage=False, columnwise_usage=True)
        return output, Kept(*inputs.prepare_for_saving())

    def gradient(self, upper: Tensor, trained: bool) -> Any:
        """See `Products`."""
        return self._quantize(self._padded(upper), self._gradients, columns=trained), len(upper)

    def of_inputs(self, upper: Any, weight: Tensor, kept: Kept, dtype: torch.dtype) -> Tensor:
        """See `Products`."""
        # Current scaling writes columns together with rows only.
        weights = self._quantize(weight, DType.kFloat8E4M3, rows=not self._blockwise, columns=True, dimensions=2)
        quantized, tokens = upper
        options = {"grad": True, "use_split_accumulator": True}
        result: Tensor = general_gemm(weights, quantized, out_dtype=dtype, layout="NN", **options)[0]
        return result[:tokens]

    def add_of_weight(self, total: Tensor, upper: Any, kept: Kept) -> None:
        """See `Products`."""
        inputs = kept.form
        inputs.restore_from_saved(list(kept.tensors))
        options = {"grad": True, "accumulate": True, "use_split_accumulator": True}
        general_gemm(inputs, upper[0], out_dtype=total.dtype, layout="NT", out=total, **options)

    def _padded(self, matrix: Tensor) -> Tensor:
        missing = -len(matrix) % self.multiple
        return pad(matrix, (0, 0, 0, missing)) if missing else matrix.contiguous()

    def _quantize(self, matrix: Tensor, dtype: Any, rows: bool = True, columns: bool = False, dimensions: int = 1) -> Any:
        if self._blockwise:
            quantizer = Float8BlockQuantizer(dtype, rowwise=rows, columnwise=columns, block_scaling_dim=dimensions)
        else:
            quantizer = Float8CurrentScalingQuantizer(dtype, matrix.device, rowwise=rows, columnwise=columns)
        quantizer.internal = True
        return quantizer(matrix)
