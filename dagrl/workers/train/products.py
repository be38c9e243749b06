"""Matrix products of half-precision matrices in float32, and products that are added to a float32 matrix by their kernel.

Imported only where torch is.
"""

from __future__ import annotations

import logging
from functools import cache

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
