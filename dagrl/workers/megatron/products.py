"""Matrix products of half-precision matrices in float32, and weight gradients that are added to Megatron's buffers by them.

Apex and Transformer Engine have an extension for the second, `gradient_accumulation_fusion` in Megatron's configuration:
without it a weight's gradient is rounded to bfloat16, written, and added to the float32 buffer in another pass. torch's
`addmm` into float32 does the same. Imported only where torch is.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Returns the matrix product in float32. On a GPU half-precision products are accumulated without rounding."""
    if left.is_cuda and left.dtype is not torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the matrix product to `total`, within the product's kernel if torch can."""
    if total.dtype is left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and total.dtype is torch.float32 and _adds_products(left.device, left.dtype):
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    else:
        total += product(left, right)


@cache
def _adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a half-precision product to a float32 matrix."""
    total, one = torch.ones(8, 8, device=device), torch.eye(8, device=device, dtype=dtype)
    try:
        torch.ops.aten.addmm.dtype_out(total, one, one, torch.float32, out=total)
    except RuntimeError as error:  # also raised for arguments that an operator does not support
        logger.info("products are added apart, torch's own cannot: %s", error)
        return False
    return bool((total == 1 + one).all())


class AddedGradients:
    """In place of the extension `fused_weight_gradient_mlp_cuda`, whose functions Megatron's linear layers call."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
        """Adds the weight gradient of `inputs` [n, columns] and `gradient` [n, rows] to `total` [rows, columns]."""
        add_product(total, gradient.T, inputs)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def use_added_gradients(config: Any) -> None:
    """Makes linear layers built with this Megatron configuration add weight gradients to Megatron's buffers."""
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = AddedGradients, True
    config.gradient_accumulation_fusion = True
