"""A Triton kernel that adds gradients: torch adds tensors of two dtypes number by number. Imported only where Triton is."""

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

ADD_BLOCK = 4096  # numbers that a program adds


def add(left: Tensor, right: Tensor) -> Tensor:
    """Adds two contiguous tensors of a shape in float32 -> `left` itself if it is float32."""
    total = left if left.dtype is torch.float32 else torch.empty_like(left, dtype=torch.float32)
    count = left.numel()
    _add_kernel[(triton.cdiv(count, ADD_BLOCK),)](left, right, total, count, ADD_BLOCK, num_warps=8)
    return total


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_kernel(left, right, total, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    value = tl.load(left + at, mask=inside, other=0.0).to(tl.float32) + tl.load(right + at, mask=inside, other=0.0)
    tl.store(total + at, value, mask=inside)
